"""Embeddings of prompts: pooled hidden states against transformers', however they are computed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import RUNNERS, TinyEngine, write_tiny_llama
from transformers import LlamaForCausalLM

from shoal.backend.live_request import normalized
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sampling_params import SamplingParams

PROMPT = [(7 * i + 3) % 90 for i in range(41)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def hidden(folder: Path) -> torch.Tensor:
    """transformers' final hidden states [num_tokens, hidden_size] of the prompt."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model.model(torch.tensor([PROMPT])).last_hidden_state[0]


class Runs(TinyEngine):
    """An engine that is asked about the prompt of these tests unless told otherwise."""

    def add(self, seq_id: int, prompt: list[int] = PROMPT, **sampling: Any) -> None:
        super().add(seq_id, prompt, **sampling)


def expected(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    return hidden.double().mean(0) if pooling == "mean" else hidden[-1].double()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("budget", [9, 64])
def test_equals_transformers(
    folder: Path, hidden: torch.Tensor, runner: str, pooling: str, budget: int
) -> None:
    runs = Runs(folder, runner, max_num_batched_tokens=budget)
    runs.add(1, pooling=pooling)
    (output,) = runs.run()[1]
    assert output.token is None
    found = torch.tensor(output.embedding, dtype=torch.float64)
    torch.testing.assert_close(found, expected(hidden, pooling), rtol=0, atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_bits_do_not_depend_on_chunks_caches_and_company(folder: Path, pooling: str) -> None:
    alone = Runs(folder, "native")
    alone.add(1, pooling=pooling)
    embedding = alone.run()[1][0].embedding
    for budget in (9, 16):
        runs = Runs(folder, "native", max_num_batched_tokens=budget)
        runs.add(1)
        runs.run()  # the prompt is cached now
        runs.add(2, pooling=pooling)
        runs.add(3, PROMPT[5:])
        runs.add(4, PROMPT[::-1], pooling="mean")
        outputs = runs.run()
        assert outputs[2][0].embedding == embedding
        assert outputs[2][0].num_cached_tokens == 0 if pooling == "mean" else True
        assert outputs[3][0].embedding == ()


def test_preemption_pools_no_token_twice(folder: Path) -> None:
    alone = Runs(folder, "native")
    alone.add(1, pooling="mean")
    embedding = alone.run()[1][0].embedding
    runs = Runs(folder, "native", num_blocks=22, max_num_batched_tokens=8, prefix_eviction=None)
    for seq_id in range(1, 5):
        runs.add(seq_id, PROMPT[:8], max_tokens=40)
    for seq_id in range(5, 9):
        runs.add(seq_id, pooling="mean")
    outputs = runs.run()
    assert runs.scheduler.num_preemptions > 0
    assert all(outputs[seq_id][-1].embedding == embedding for seq_id in range(5, 9))


def test_a_sequence_that_starts_over_goes_on_pooling(folder: Path) -> None:
    runs = Runs(folder, "native", max_num_batched_tokens=8)
    runs.add(1, pooling="mean")
    runs.engine.step()
    runs.engine.step()
    sequence = runs.scheduler._running[0]
    assert sequence.pooled is not None
    assert sequence.pooled.num_tokens == 16
    runs.scheduler._preempt(sequence)
    runs.scheduler.check_integrity()
    again = runs.run()[1][0].embedding
    alone = Runs(folder, "native")
    alone.add(1, pooling="mean")
    assert again == alone.run()[1][0].embedding


def test_normalised_and_cut() -> None:
    assert normalized((3.0, 4.0), None) == (0.6, 0.8)
    assert normalized((3.0, 4.0), 1) == (1.0,)
    assert normalized((0.0, 0.0), None) == (0.0, 0.0)
    assert math.fsum(v * v for v in normalized((1.0, 2.0, 3.0), 2)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"pooling": "max"}, "pooling"),
        ({"dimensions": 3}, "dimensions"),
        ({"pooling": "mean", "dimensions": 0}, "dimensions"),
        ({"pooling": "mean", "n": 2}, "n"),
        ({"pooling": "mean", "max_tokens": 3}, "max_tokens"),
        ({"pooling": "mean", "logprobs": 1}, "logprobs"),
    ],
)
def test_refused_by_name(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams.from_dict(values)
    assert refused.value.param == param
