"""Grammars whose lexer outgrows its limits: who is at fault, and who must not notice."""

import random
import time

import pytest
import torch

from shoal.backend.grammar_compiler import GrammarCompiler
from shoal.backend.grammar_matcher import GrammarMatchers, StepMasks
from shoal.backend.structured_output import take_grammar
from shoal.backend.text.tokenizer import Tokenizer
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

VOCAB, EOS = 49152, 2
NUM_TOKENS = 48  # of texts that break nothing alone


@pytest.fixture
def matchers(smollm2_tokenizer: Tokenizer) -> GrammarMatchers:
    return GrammarMatchers(GrammarCompiler(lambda: smollm2_tokenizer, VOCAB, [EOS]), 8)


class Writer:
    """A sequence that takes any token that its grammar allows, but the end."""

    def __init__(self, seq_id: int, grammar: str, seed: int) -> None:
        sampling = SamplingParams(grammar=grammar, grammar_param="guided_regex")
        self.sequence = Sequence(seq_id, [1], 1, sampling)
        self._random = random.Random(seed)

    def write(self, masks: StepMasks) -> None:
        allowed = masks.allowed.of(self.sequence.seq_id, VOCAB).nonzero()[:, 0].tolist()
        others = [token_id for token_id in allowed if token_id != EOS] or allowed
        self.sequence.token_ids.append(self._random.choice(others))


def step(matchers: GrammarMatchers, writers: list[Writer]) -> StepMasks:
    """One token for each that need not wait."""
    masks = matchers.masks([writer.sequence for writer in writers], VOCAB)
    for writer in writers:
        if writer.sequence.seq_id in masks.allowed.rows:
            writer.write(masks)
    if masks.waiting:
        time.sleep(0.002)
    return masks


def tokens_until_broken(matchers: GrammarMatchers, writer: Writer) -> int:
    while not (masks := step(matchers, [writer])).broken:
        assert writer.sequence.num_output_tokens < 400
    assert "too many" in masks.broken[writer.sequence.seq_id]
    return writer.sequence.num_output_tokens


def grammar_of(pattern: str) -> str:
    grammar = take_grammar({"guided_regex": pattern})
    assert grammar is not None
    return grammar


def test_who_breaks_a_grammar_harms_nobody_who_comes_later(matchers: GrammarMatchers) -> None:
    grammar = grammar_of("[a-z ]*e[a-z ]{30}t")
    broke_at = tokens_until_broken(matchers, Writer(1, grammar, seed=0))
    later = Writer(2, grammar, seed=0)
    assert tokens_until_broken(matchers, later) == broke_at  # and for itself as late


def test_a_lexer_that_many_filled_breaks_none_of_them(matchers: GrammarMatchers) -> None:
    grammar = grammar_of("[a-z ]*e[a-z ]{20}t")
    compiled = matchers._compiler.compile(grammar)
    had_to_wait = 0
    writers = [Writer(seq_id, grammar, seed=seq_id) for seq_id in range(6)]
    while any(writer.sequence.num_output_tokens < NUM_TOKENS for writer in writers):
        masks = step(matchers, [w for w in writers if w.sequence.num_output_tokens < NUM_TOKENS])
        assert not masks.broken
        had_to_wait += bool(masks.waiting)
    assert had_to_wait
    assert matchers._compiler.compile(grammar) is not compiled  # it was given up


def test_masks_are_the_same_alone_and_together(matchers: GrammarMatchers) -> None:
    patterns = ["[a-z]{3,9}", "(yes|no)!", r"\d+(\.\d+)?"]
    together = [Writer(10 + i, grammar_of(pattern), i) for i, pattern in enumerate(patterns)]
    alone = [Writer(20 + i, grammar_of(pattern), i) for i, pattern in enumerate(patterns)]
    for _ in range(3):
        while (masks := matchers.masks([w.sequence for w in together], VOCAB)).waiting:
            time.sleep(0.002)
        for one, same in zip(alone, together, strict=True):
            while (own := matchers.masks([one.sequence], VOCAB)).waiting:
                time.sleep(0.002)
            row = own.allowed.packed[own.allowed.rows[one.sequence.seq_id]]
            beside = masks.allowed.packed[masks.allowed.rows[same.sequence.seq_id]]
            assert torch.equal(row, beside)
            one.write(own)
            same.write(masks)
