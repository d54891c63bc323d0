"""Greedy text through the whole stack equals transformers', alone and together."""

import asyncio
from pathlib import Path

import pytest
from greedy_reference import GreedyReference, prompt_ids
from served import MODEL, Served
from triton_calls import generate

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def expected(smollm2_path: Path) -> list[list[int]]:
    reference = GreedyReference(smollm2_path)
    return [reference.generate(prompt, NUM_TOKENS) for prompt in prompt_ids(smollm2_path)]


async def greedy(served: Served, prompt: list[int]) -> list[int]:
    answer = await generate(
        served.grpc_url, MODEL, prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    assert answer.error is None
    assert answer.finish_reasons == ["length"]
    assert answer.num_output_tokens == NUM_TOKENS
    assert answer.num_input_tokens == len(prompt)
    return answer.token_ids


async def test_alone(served: Served, smollm2_path: Path, expected: list[list[int]]) -> None:
    got = [await greedy(served, prompt) for prompt in prompt_ids(smollm2_path)]
    assert got == expected


async def test_all_at_once(served: Served, smollm2_path: Path, expected: list[list[int]]) -> None:
    prompts = prompt_ids(smollm2_path)
    got = await asyncio.gather(*(greedy(served, prompt) for prompt in prompts))
    assert list(got) == expected
