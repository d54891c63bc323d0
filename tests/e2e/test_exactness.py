"""Greedy text through the whole stack equals transformers', alone and together."""

import asyncio
from pathlib import Path

import pytest
from greedy_reference import GreedyReference, prompt_ids
from served import MODEL, Served
from triton_calls import generate

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> GreedyReference:
    return GreedyReference(smollm2_path)


async def greedy(served: Served, prompt: list[int]) -> list[int]:
    answer = await generate(
        served.grpc_url, MODEL, prompt, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    assert answer.error is None
    assert answer.finish_reasons == ["length"]
    assert answer.num_output_tokens == NUM_TOKENS
    assert answer.num_input_tokens == len(prompt)
    return answer.token_ids


async def test_20_prompts_alone_and_at_once(
    served: Served, smollm2_path: Path, reference: GreedyReference
) -> None:
    prompts = prompt_ids(smollm2_path)
    assert len(prompts) == 20
    alone = [await greedy(served, prompt) for prompt in prompts]
    together = await asyncio.gather(*(greedy(served, prompt) for prompt in prompts))
    for prompt, tokens in zip(prompts, alone, strict=True):
        assert tokens == reference.follow(prompt, tokens)
    assert list(together) == alone


async def test_decoding_a_token_at_a_time(
    served: Served, smollm2_path: Path, reference: GreedyReference
) -> None:
    for prompt in prompt_ids(smollm2_path)[:2]:
        assert await greedy(served, prompt) == reference.generate(prompt, NUM_TOKENS)
