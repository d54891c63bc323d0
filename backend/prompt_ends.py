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
MAX_LOGITS_BYTES = 4 * 2**20  # at least one row
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
    logits: torch.Tensor | None = None  # float32 [vocab_size]; see KeptLogits


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

    def keep(self, sequence: Sequence, states: torch.Tensor) -> PromptEnd | None:
        """Keep a copy of ``states`` [hidden_size], which come after all known tokens. What else is
        known of such an end stays with it. None: they take too much."""
        key = _key(sequence)
        known = self._ends.get(key)
        if known is not None:
            self._ends.move_to_end(key)
            known.states.copy_(states)
            return known
        num_bytes = _num_bytes(key, states)
        if num_bytes > self._max_bytes:
            return None
        self._num_bytes += num_bytes
        end = self._ends[key] = PromptEnd(states.clone())
        while self._num_bytes > self._max_bytes:
            key, oldest = self._ends.popitem(last=False)
            self._num_bytes -= _num_bytes(key, oldest.states)
        return end


class KeptLogits:
    """Which ends have their logits, too: the latest used, within a bound of bytes."""

    def __init__(self, max_bytes: int = MAX_LOGITS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._ends: OrderedDict[int, PromptEnd] = OrderedDict()  # by id

    def note_use(self, end: PromptEnd) -> None:
        self._ends.move_to_end(id(end))

    def keep(self, end: PromptEnd, logits: torch.Tensor) -> None:
        """Keep a copy of ``logits`` [vocab_size] with an end, unless it has them already."""
        if end.logits is not None:
            self.note_use(end)
            return
        end.logits = logits.clone()
        self._ends[id(end)] = end
        self._num_bytes += logits.nbytes
        while self._num_bytes > self._max_bytes and len(self._ends) > 1:
            _, oldest = self._ends.popitem(last=False)
            assert oldest.logits is not None
            self._num_bytes -= oldest.logits.nbytes
            oldest.logits = None


class KnownEnds:
    """What spares a prompt that is cached whole its forward pass: the states after prompts' ends,
    and the model's output projection for them. What that gave is kept, too: the likeliest token, or
    some prompts' logits."""

    def __init__(self, head: NativeHead, ends: PromptEnds | None = None) -> None:
        self._head = head
        self._logits = KeptLogits()
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
        known = (self._likeliest(ends) if takes_likeliest else None) or self._all_logits(ends)
        if known is not None:
            return known
        likeliest = LikeliestTokens() if takes_likeliest else None
        states = torch.stack([end.states for end in ends])
        logits = self._head.project(KnownStates(states, likeliest, spent_logits))
        projected = Projected.of(logits, likeliest)
        self._note(ends, projected)
        return projected

    def _likeliest(self, ends: list[PromptEnd]) -> Projected | None:
        tokens = [end.likeliest for end in ends if end.likeliest is not None]
        return Projected(None, tokens) if len(tokens) == len(ends) else None

    def _all_logits(self, ends: list[PromptEnd]) -> Projected | None:
        """A copy: who samples may write to it."""
        logits = [end.logits for end in ends if end.logits is not None]
        if len(logits) < len(ends):
            return None
        for end in ends:
            self._logits.note_use(end)
        return Projected(torch.stack(logits), None)

    def _note(self, ends: list[PromptEnd], projected: Projected) -> None:
        if projected.tokens is not None:
            for end, token in zip(ends, projected.tokens, strict=True):
                end.likeliest = token
        elif projected.logits is not None:
            for end, logits in zip(ends, projected.logits, strict=True):
                self._logits.keep(end, logits)

    @staticmethod
    def of_step(
        scheduled: SequenceOf[ScheduledSequence], rows: LogitsRows
    ) -> list[tuple[Sequence, int]]:
        """Whose prompts end in a step so that it is worth keeping, and their rows of its logits."""
        sampled = [item.sequence for item in scheduled if item.samples]
        pairs = zip(sampled, rows.sampled, strict=True)
        return [
            (sequence, row)
            for sequence, row in pairs
            if len(sequence.token_ids) == sequence.num_prompt_tokens and PromptEnds.wants(sequence)
        ]

    def keep(
        self, ended: list[tuple[Sequence, int]], states: torch.Tensor, projected: Projected
    ) -> None:
        """Those of ``of_step``, of the step's final states and what these gave."""
        tokens, logits = projected.tokens, projected.logits
        for sequence, row in ended:
            end = self.ends.keep(sequence, states[row])
            if end is None:
                continue
            if tokens is not None:
                end.likeliest = tokens[row]
            elif logits is not None:
                self._logits.keep(end, logits[row])


def _is_told_by_its_tokens(sequence: Sequence) -> bool:
    """Whether its state is that of any other sequence of these tokens: no image among them and none
    dropped; and whether it is to be continued, as no embedding is."""
    is_text = not sequence.images and sequence.sampling.pooling is None
    return is_text and sequence.eviction is None


def _key(sequence: Sequence) -> _Key:
    return sequence.cache_salt, array("i", sequence.token_ids).tobytes()


def _num_bytes(key: _Key, states: torch.Tensor) -> int:
    return sum(map(len, key)) + states.nbytes + _ENTRY_BYTES
