"""A KV pool for ten sequences and forty at once: all end, with the text that each has alone."""

import asyncio
import random
from collections.abc import Iterator

import pytest
from served import MODEL, Served, serve
from triton_calls import Answer, generate

NUM_REQUESTS, NUM_FIT = 40, 10
PROMPT_TOKENS, OUTPUT_TOKENS = 33, 40
NUM_BLOCKS = NUM_FIT * 5  # of 16 tokens


@pytest.fixture(scope="module", params=[True, False], ids=["tree and host", "checkpoints"])
def squeezed(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(
        tmp_path_factory.mktemp("squeezed"),
        dtype="float32",
        num_kv_blocks=NUM_BLOCKS,
        max_model_len=128,
        max_num_seqs=NUM_REQUESTS,
        host_kv_mib=128,
        prefix_caching=request.param,
    ) as server:
        yield server


async def ask(server: Served, index: int) -> Answer:
    prompt = random.Random(index).choices(range(1000, 40_000), k=PROMPT_TOKENS)
    return await generate(
        server.grpc_url,
        MODEL,
        prompt,
        max_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        seed=index,
        temperature=1.0,
    )


async def test_forty_where_ten_fit(squeezed: Served) -> None:
    start = len(squeezed.steps())
    together = await asyncio.gather(*(ask(squeezed, i) for i in range(NUM_REQUESTS)))
    steps = squeezed.steps()[start:]
    status = squeezed.wait_idle()
    assert [answer.num_output_tokens for answer in together] == [OUTPUT_TOKENS] * NUM_REQUESTS
    preemptions = [item for step in steps for item in step["preemptions"]]
    assert preemptions, "the pool was never short"
    for item in preemptions:
        copies = item["copy_ms"] is not None and item["copy_ms"] < item["recompute_ms"]
        assert (item["way"] == "recompute") == (not copies), "the dearer way was taken"
    assert any(step["restored"] for step in steps)
    assert status["free_blocks"] == NUM_BLOCKS
    assert status["pressure"] == "calm"
    for index in range(0, NUM_REQUESTS, 4):
        alone = await ask(squeezed, index)
        assert alone.token_ids == together[index].token_ids
