"""What the model thinks of a prompt's own tokens, as OpenAI's echo with logprobs wants it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_builders import BOS, make_tokenizer
from tiny_engine import TinyEngine, write_tiny_llama
from transformers import LlamaForCausalLM

from shoal.backend.text.token_logprobs import describe_prompt
from shoal.scheduler.outputs import SampledToken
from shoal.scheduler.sequence import FinishReason

PROMPT = [(7 * i + 3) % 90 for i in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """transformers' log-probabilities [num_tokens, vocab_size] after each token of the prompt."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], dim=-1)


class Runs(TinyEngine):
    """An engine that is asked about the prompt of these tests unless told otherwise."""

    def add(self, seq_id: int, prompt: list[int] = PROMPT, **sampling: Any) -> None:
        super().add(seq_id, prompt, **sampling)


def assert_scores(scores: tuple[SampledToken, ...], expected: torch.Tensor, top: int) -> None:
    assert [score.token_id for score in scores] == PROMPT[1:]
    for position, score in enumerate(scores, start=1):
        row = expected[position - 1]
        assert score.logprob == pytest.approx(row[score.token_id].item(), abs=1e-4)
        best = row.topk(top)
        assert [token for token, _ in score.top_logprobs] == best.indices.tolist()


@pytest.mark.parametrize("budget", [8, 10, 64])
def test_scores_are_transformers_log_softmax(
    folder: Path, expected: torch.Tensor, budget: int
) -> None:
    runs = Runs(folder, max_num_batched_tokens=budget)
    runs.add(1, prompt_logprobs=3)
    first, second = runs.run()[1]
    assert_scores(first.prompt_logprobs, expected, 3)
    assert second.prompt_logprobs == ()
    assert first.token is not None
    assert first.token.token_id == int(expected[-1].argmax())


def test_a_cached_prompt_is_scored_all_the_same(folder: Path, expected: torch.Tensor) -> None:
    runs = Runs(folder)
    runs.add(1)
    runs.run()
    runs.add(2, prompt_logprobs=1)
    runs.add(3)
    outputs = runs.run()
    assert_scores(outputs[2][0].prompt_logprobs, expected, 1)
    assert outputs[2][0].num_cached_tokens == 0
    assert outputs[3][0].num_cached_tokens > 0


def test_scores_survive_preemption_and_company(folder: Path, expected: torch.Tensor) -> None:
    runs = Runs(folder, num_blocks=16, max_num_batched_tokens=12, max_num_seqs=8)
    for seq_id in range(1, 7):
        scored = {"prompt_logprobs": 2} if seq_id % 2 else {}
        runs.add(seq_id, max_tokens=12, **scored)
    outputs = runs.run()
    assert runs.scheduler.num_preemptions > 0
    for seq_id, results in outputs.items():
        tokens = [item.token.token_id for item in results if item.token is not None]
        assert len(tokens) == 12
        if seq_id % 2:
            assert_scores(results[0].prompt_logprobs, expected, 2)


def test_a_prompt_may_be_scored_alone(folder: Path, expected: torch.Tensor) -> None:
    runs = Runs(folder)
    runs.add(1, prompt_logprobs=1, max_tokens=0)
    (output,) = runs.run()[1]
    assert output.token is None
    assert output.finish_reason is FinishReason.LENGTH
    assert_scores(output.prompt_logprobs, expected, 1)


def test_a_prompt_of_one_token_has_nothing_to_score(folder: Path) -> None:
    runs = Runs(folder)
    runs.add(1, [5], prompt_logprobs=1, max_tokens=0)
    (output,) = runs.run()[1]
    assert output.prompt_logprobs == ()


@given(st.text(max_size=12))
def test_entries_spell_the_prompt(text: str) -> None:
    tokenizer = make_tokenizer(add_bos=True)
    token_ids = tokenizer.encode(text, add_bos=True)
    assert token_ids[0] == BOS
    scores = [SampledToken(token_id, -1.0) for token_id in token_ids[1:]]
    entries = describe_prompt(tokenizer, token_ids, scores, text)
    assert "".join(entry.sampled.text for entry in entries) == text
    assert entries[0].sampled.logprob is None
    assert [entry.sampled.token_id for entry in entries] == token_ids


@given(st.lists(st.integers(0, 255) | st.just(BOS), min_size=1, max_size=12))
def test_entries_spell_token_ids(token_ids: list[int]) -> None:
    tokenizer = make_tokenizer(add_bos=True)
    scores = [SampledToken(token_id, -1.0) for token_id in token_ids[1:]]
    text = tokenizer.decode(token_ids)
    entries = describe_prompt(tokenizer, token_ids, scores, text)
    assert "".join(entry.sampled.text for entry in entries) == text
