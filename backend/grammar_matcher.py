"""Grammars at work: which tokens may come next in each sequence that must follow one."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from llguidance import LLMatcher

from shoal.backend.grammar_compiler import GrammarCompiler, GrammarError
from shoal.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Matcher:
    grammar: str
    matcher: LLMatcher
    num_consumed: int  # output tokens


class GrammarMatchers:
    """Follows sequences through their grammars.

    A matcher's state is a function of the grammar and the sequence's output, so that preemption,
    replay and forks need nothing: what is missing is built again.
    """

    def __init__(self, compiler: GrammarCompiler, max_matchers: int) -> None:
        """``max_matchers``: of sequences, whose state is kept."""
        self._compiler = compiler
        self._max_matchers = max_matchers
        self._matchers: OrderedDict[int, _Matcher] = OrderedDict()  # by seq_id

    def allowed_tokens(self, sequence: Sequence, vocab_size: int) -> torch.Tensor:
        """Which tokens may be the sequence's next; bool [vocab_size]. Raises GrammarError."""
        matcher = self._follow(sequence)
        packed = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        bits = packed[:, None].bitwise_and(_BITS).ne(0).flatten()
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        count = min(vocab_size, len(bits))
        allowed[:count] = bits[:count]
        return allowed

    def _follow(self, sequence: Sequence) -> LLMatcher:
        """The sequence's matcher, advanced to the end of its output."""
        grammar = sequence.sampling.grammar
        assert grammar is not None
        state = self._matchers.get(sequence.seq_id)
        if state is None or state.grammar is not grammar:
            state = _Matcher(grammar, self._compiler.compile(grammar).result().deep_copy(), 0)
            self._matchers[sequence.seq_id] = state
            while len(self._matchers) > self._max_matchers:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(sequence.seq_id)
        new_tokens = sequence.token_ids[sequence.num_prompt_tokens + state.num_consumed :]
        if new_tokens and not state.matcher.consume_tokens(new_tokens):
            raise GrammarError(state.matcher.get_error())
        state.num_consumed += len(new_tokens)
        return state.matcher


_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
