"""The final hidden states of prompts' last tokens, for prompts that come again."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shoal.backend.forward_batch import KnownStates, LikeliestTokens
from shoal.backend.logits_rows import LogitsRows
from shoal.backend.models.native_head import NativeHead
from shoal.scheduler.outputs import ScheduledSequence
from shoal.scheduler.sequence import Sequence

MAX_BYTES = 8 * 2**20
_ENTRY_BYTES = 512  # about what an entry takes beside its ids and its states

_Key = tuple[bytes, bytes]  # salt, token ids


class Projected(NamedTuple):
    """What a step's final states gave: logits, or where nothing else is wanted tokens, -1 standing
    for no usable prediction."""

    logits: torch.Tensor | None  # float32 [num_samples, vocab_size]
    tokens: list[int] | None

    @classmethod
    def of(cls, logits: torch.Tensor, likeliest: LikeliestTokens | None) -> "Projected":
        if likeliest is None or likeliest.tokens is None:
            return cls(logits, None)
        return cls(logits, likeliest.tokens.tolist())


@dataclass(slots=True)
class PromptEnd:
    """What comes after a prompt: states, float32 [hidden_size]; the likeliest token once known."""

    states: torch.Tensor
    likeliest: int | None = None


class PromptEnds:
    """What the logits after a prompt are made of: a row of states each, the latest used, within a
    bound of bytes.

    Exact where a row's bits depend on its own tokens alone. Prompts are told apart by all their
    tokens, not by a hash, and by their salt, as in the prefix cache. Owned by the engine thread.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._ends: OrderedDict[_Key, PromptEnd] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    @staticmethod
    def wants(sequence: Sequence) -> bool:
        """Whether what comes after its last known token is worth keeping."""
        return sequence.num_output_tokens == 0 and _is_told_by_its_tokens(sequence)

    def find(self, sequence: Sequence) -> PromptEnd | None:
        """What comes after all known tokens of a sequence, if it is here."""
        if not _is_told_by_its_tokens(sequence):
            return None
        key = _key(sequence)
        end = self._ends.get(key)
        if end is not None:
            self._ends.move_to_end(key)
        return end

    def keep(self, sequence: Sequence, states: torch.Tensor, likeliest: int | None = None) -> None:
        """Keep a copy of ``states`` [hidden_size], which come after all known tokens."""
        key = _key(sequence)
        self._forget(key)
        num_bytes = _num_bytes(key, states)
        if num_bytes > self._max_bytes:
            return
        self._num_bytes += num_bytes
        self._ends[key] = PromptEnd(states.clone(), likeliest)
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._ends)))

    def _forget(self, key: _Key) -> None:
        end = self._ends.pop(key, None)
        if end is not None:
            self._num_bytes -= _num_bytes(key, end.states)


class KnownEnds:
    """What spares a prompt that is cached whole its forward pass: the states after prompts' ends,
    and the model's output projection for them. The likeliest token after a prompt needs not even
    that again."""

    def __init__(self, head: NativeHead, ends: PromptEnds | None = None) -> None:
        self._head = head
        self.ends = PromptEnds() if ends is None else ends

    def project(
        self,
        scheduled: SequenceOf[ScheduledSequence],
        takes_likeliest: bool,
        spent_logits: torch.Tensor | None,
    ) -> Projected | None:
        """What a step gives that lacks nothing but logits and whose ends are all known; else None.
        ``takes_likeliest``: it wants no other tokens, and nothing else."""
        if not all(item.only_lacks_logits for item in scheduled):
            return None
        ends = []
        for item in scheduled:
            end = self.ends.find(item.sequence)
            if end is None:
                return None
            ends.append(end)
        if takes_likeliest:
            tokens = [end.likeliest for end in ends if end.likeliest is not None]
            if len(tokens) == len(ends):
                return Projected(None, tokens)
        likeliest = LikeliestTokens() if takes_likeliest else None
        states = torch.stack([end.states for end in ends])
        logits = self._head.project(KnownStates(states, likeliest, spent_logits))
        projected = Projected.of(logits, likeliest)
        for end, token in zip(ends, projected.tokens or (), strict=False):
            end.likeliest = token
        return projected

    @staticmethod
    def of_step(
        scheduled: SequenceOf[ScheduledSequence], rows: LogitsRows
    ) -> list[tuple[Sequence, int]]:
        """Whose prompts end in a step so that it is worth keeping, and their rows of its logits."""
        sampled = [item.sequence for item in scheduled if item.samples]
        pairs = zip(sampled, rows.sampled, strict=True)
        return [(sequence, row) for sequence, row in pairs if PromptEnds.wants(sequence)]

    def keep(
        self, ended: list[tuple[Sequence, int]], states: torch.Tensor, projected: Projected
    ) -> None:
        """Those of ``of_step``, of the step's final states."""
        tokens = projected.tokens
        for sequence, row in ended:
            self.ends.keep(sequence, states[row], None if tokens is None else tokens[row])


def _is_told_by_its_tokens(sequence: Sequence) -> bool:
    """Whether its state is that of any other sequence of these tokens: no image among them and none
    dropped; and whether it is to be continued, as no embedding is."""
    is_text = not sequence.images and sequence.sampling.pooling is None
    return is_text and sequence.eviction is None


def _key(sequence: Sequence) -> _Key:
    return sequence.cache_salt, array("i", sequence.token_ids).tobytes()


def _num_bytes(key: _Key, states: torch.Tensor) -> int:
    return sum(map(len, key)) + states.nbytes + _ENTRY_BYTES
