"""The final hidden states of prompts' last tokens, for prompts that come again."""

from array import array
from collections import OrderedDict

import torch

from shoal.scheduler.sequence import Sequence

MAX_BYTES = 8 * 2**20
_ENTRY_BYTES = 512  # about what an entry takes beside its ids and its states

_Key = tuple[bytes, bytes]  # salt, token ids


class PromptEnds:
    """What the logits after a prompt are made of: a row of states each, the latest used, within a
    bound of bytes. With them a prompt whose keys and values are all cached needs no forward pass.

    Exact where a row's bits depend on its own tokens alone. Prompts are told apart by all their
    tokens, not by a hash, and by their salt, as in the prefix cache. Owned by the engine thread.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._states: OrderedDict[_Key, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    @staticmethod
    def wants(sequence: Sequence) -> bool:
        """Whether the state after its last known token is worth keeping."""
        return sequence.num_output_tokens == 0 and _is_told_by_its_tokens(sequence)

    def find_all(self, sequences: list[Sequence]) -> torch.Tensor | None:
        """The states after all known tokens of these sequences, float32 [len(sequences),
        hidden_size], if all are here."""
        found = []
        for sequence in sequences:
            states = self._find(sequence)
            if states is None:
                return None
            found.append(states)
        return torch.stack(found)

    def _find(self, sequence: Sequence) -> torch.Tensor | None:
        if not _is_told_by_its_tokens(sequence):
            return None
        key = _key(sequence)
        states = self._states.get(key)
        if states is not None:
            self._states.move_to_end(key)
        return states

    def keep(self, sequence: Sequence, states: torch.Tensor) -> None:
        """Keep a copy of ``states`` [hidden_size], which come after all known tokens."""
        key = _key(sequence)
        self._forget(key)
        num_bytes = _num_bytes(key, states)
        if num_bytes > self._max_bytes:
            return
        self._num_bytes += num_bytes
        self._states[key] = states.clone()
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._states)))

    def _forget(self, key: _Key) -> None:
        states = self._states.pop(key, None)
        if states is not None:
            self._num_bytes -= _num_bytes(key, states)


def _is_told_by_its_tokens(sequence: Sequence) -> bool:
    """Whether its state is that of any other sequence of these tokens: no image among them and none
    dropped; and whether it is to be continued, as no embedding is."""
    is_text = not sequence.images and sequence.sampling.pooling is None
    return is_text and sequence.eviction is None


def _key(sequence: Sequence) -> _Key:
    return sequence.cache_salt, array("i", sequence.token_ids).tobytes()


def _num_bytes(key: _Key, states: torch.Tensor) -> int:
    return sum(map(len, key)) + states.nbytes + _ENTRY_BYTES
