"""Grammars at work: which tokens may come next in each sequence that must follow one."""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from llguidance import LLExecutor, LLMatcher

from shoal.backend.grammar_compiler import GrammarCompiler, GrammarError
from shoal.backend.logits_processors import AllowedTokens
from shoal.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Follower:
    """A sequence's way through its grammar. ``matcher`` is None while it is being built."""

    grammar: str
    built: "Future[LLMatcher]"
    num_consumed: int = 0  # output tokens
    matcher: LLMatcher | None = None
    is_alone: bool = False  # its matcher shares nothing with those of other sequences


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Of one step, by seq_id: what may come next; why a grammar broke; who must wait for another
    step, since a matcher is being built."""

    allowed: AllowedTokens
    broken: dict[int, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)


class GrammarMatchers:
    """Follows sequences through their grammars. One thread uses it.

    A matcher's state is a function of the grammar and the sequence's output, so that preemption,
    replay and forks need nothing: what is missing is built again.

    Copies of a compiled grammar share its lexer, which grows with all the texts that it meets and
    whose size is limited. So a sequence that meets the limit is not at fault yet: it gets a lexer
    of its own, built beside the step loop, while those that come after it share a new one. Only
    what breaks alone breaks.
    """

    def __init__(self, compiler: GrammarCompiler, max_matchers: int, num_threads: int = 1) -> None:
        """``max_matchers``: of sequences, whose state is kept."""
        self._compiler = compiler
        self._max_matchers = max_matchers
        self._followers: OrderedDict[int, _Follower] = OrderedDict()  # by seq_id
        self._executor = LLExecutor(num_threads)

    def masks(self, sequences: SequenceOf[Sequence], vocab_size: int) -> StepMasks:
        """Which tokens may be next in each of these sequences, which all follow grammars."""
        while len(self._followers) > max(self._max_matchers, len(sequences)):
            self._followers.popitem(last=False)
        num_words = (vocab_size + 31) // 32
        masks = StepMasks(AllowedTokens(torch.zeros(len(sequences), num_words, dtype=torch.int32)))
        ready: list[tuple[Sequence, _Follower, LLMatcher]] = []
        for sequence in sequences:
            follower = self._follower(sequence)
            try:
                matcher = self._advanced(sequence, follower)
            except GrammarError as error:
                masks.broken[sequence.seq_id] = str(error)
                continue
            if matcher is None:
                masks.waiting.add(sequence.seq_id)
            else:
                ready.append((sequence, follower, matcher))
        self._compute([matcher for _, _, matcher in ready], masks.allowed.packed)
        for row, (sequence, follower, matcher) in enumerate(ready):
            if not matcher.is_error():
                masks.allowed.rows[sequence.seq_id] = row
            elif follower.is_alone:
                masks.broken[sequence.seq_id] = matcher.get_error()
            else:
                self._set_apart(sequence, follower)
                masks.waiting.add(sequence.seq_id)
        return masks

    def _compute(self, matchers: list[LLMatcher], packed: torch.Tensor) -> None:
        """A row each, on llguidance's own threads."""
        if matchers:
            rows = [(matcher, row) for row, matcher in enumerate(matchers)]
            address, num_bytes = packed.data_ptr(), packed.shape[1] * packed.itemsize
            self._executor.unsafe_compute_mask_ptr(rows, address, num_bytes, len(packed))

    def _follower(self, sequence: Sequence) -> _Follower:
        grammar = sequence.sampling.grammar
        assert grammar is not None
        found = self._followers.get(sequence.seq_id)
        if found is None or found.grammar is not grammar:
            found = _Follower(grammar, self._compiler.compile(grammar))
            self._followers[sequence.seq_id] = found
        self._followers.move_to_end(sequence.seq_id)
        return found

    def _advanced(self, sequence: Sequence, follower: _Follower) -> LLMatcher | None:
        """The sequence's matcher at the end of its output; None: not built yet."""
        if follower.matcher is None:
            if not follower.built.done():
                return None
            built = follower.built.result()
            follower.matcher = built if follower.is_alone else built.deep_copy()
        start = sequence.num_prompt_tokens + follower.num_consumed
        new_tokens = sequence.token_ids[start:]
        if new_tokens and not follower.matcher.consume_tokens(new_tokens):
            if follower.is_alone:
                raise GrammarError(follower.matcher.get_error())
            self._set_apart(sequence, follower)
            return None
        follower.num_consumed += len(new_tokens)
        return follower.matcher

    def _set_apart(self, sequence: Sequence, follower: _Follower) -> None:
        """Have a matcher built that shares nothing, at the end of the sequence's output."""
        self._compiler.forget(follower.grammar, follower.built)
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        follower.built = self._compiler.follow(follower.grammar, output)
        follower.num_consumed = len(output)
        follower.matcher, follower.is_alone = None, True
