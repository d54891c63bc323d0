"""Compiles grammars for one vocabulary, in a thread of its own and within limits."""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from secrets import token_hex
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shoal.backend.text.tokenizer import Tokenizer

MAX_COMPILED = 64  # grammars kept for the next request that brings the same one

# Of work, not of time, so that what is refused does not depend on the machine: a compilation and
# its first step take well under a second, later steps milliseconds.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that a sequence has left: the sequence must fail."""


class GrammarCompiler:
    """``load_tokenizer`` is called once, in the compiling thread, with the first grammar."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-grammar")
        self._lock = Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """Start to compile, or give what was compiled before: a matcher to copy, at its start.

        The future's exception is a GrammarError where the grammar is at fault.
        """
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                future = self._compiled[grammar] = self._pool.submit(self._compile, grammar)
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return future

    def forget(self, grammar: str, compiled: "Future[LLMatcher]") -> None:
        """Compile anew for the next who asks, unless that was done already."""
        with self._lock:
            if self._compiled.get(grammar) is compiled:
                del self._compiled[grammar]

    def follow(self, grammar: str, token_ids: list[int]) -> "Future[LLMatcher]":
        """A matcher of its own, of which nothing is shared, that has followed an output step by
        step. The future's exception is a GrammarError where the grammar breaks on the way."""
        return self._pool.submit(self._follow, grammar, token_ids)

    def _follow(self, grammar: str, token_ids: list[int]) -> LLMatcher:
        matcher = self._new_matcher(grammar)
        for token_id in token_ids:
            matcher.compute_bitmask()  # as each step did: it builds what the next one needs
            if not matcher.consume_token(token_id):
                break
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def _new_matcher(self, grammar: str) -> LLMatcher:
        if self._vocabulary is None:
            tokenizer = _rename_special_tokens(self._load_tokenizer().to_json())
            self._vocabulary = LLTokenizer(tokenizer, self._vocab_size, self._eos_token_ids)
        return LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = self._new_matcher(grammar)
        probe = matcher.deep_copy()
        if not probe.is_error():
            # The first steps build much of the lexer, which all copies share, and show most faults.
            mask = int.from_bytes(probe.compute_bitmask(), "little")
            probe.consume_token((mask & -mask).bit_length() - 1)
        if probe.is_error():
            raise GrammarError(probe.get_error())
        return matcher


def _rename_special_tokens(tokenizer: str) -> str:
    """A tokenizer.json whose special tokens have names that no text holds.

    Text that a grammar leaves no choice about is tokenised; what reads like a special token there
    is text all the same.
    """
    values = json.loads(tokenizer)
    salt = token_hex(16)
    names = {
        item["content"]: f"<{salt}:{item['id']}>"
        for item in values["added_tokens"]
        if item["special"]
    }
    for item in values["added_tokens"]:
        item["content"] = names.get(item["content"], item["content"])
    model = values["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): idx for text, idx in model["vocab"].items()}
    else:  # Unigram's pieces and scores
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(values)
