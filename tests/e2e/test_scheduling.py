"""Iteration-level scheduling, read from the engine's own step log."""

import asyncio

from served import MODEL, Served
from triton_calls import Answer, generate, inputs_of, results

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


async def test_short_prompt_joins_four_long_streams(served: Served) -> None:
    start = len(served.steps())
    long_runs = [
        asyncio.create_task(long_stream(served, f"Tell a long story about the number {i}."))
        for i in range(4)
    ]
    await until_running(served, start, 4)
    newcomer = await generate(served.grpc_url, MODEL, list(range(1000, 1016)), max_tokens=3)
    assert newcomer.num_input_tokens == 16
    answers = await asyncio.gather(*long_runs)
    assert [answer.num_output_tokens for answer in answers] == [512] * 4

    steps = served.steps()[start:]
    seq_id = steps_of_new_sequence(steps)
    arrival = next(step["step"] for step in steps if seq_id in step["added"])
    first_token = next(
        step["step"]
        for step in steps
        if any(item["seq_id"] == seq_id and item["samples"] for item in step["seqs"])
    )
    assert first_token - arrival < 2, "the first token must come within 2 steps of arrival"
    beside = next(step for step in steps if step["step"] == first_token)
    assert len(beside["seqs"]) == 5, "it must have joined the four running streams"
    ended = next(step["step"] for step in steps if seq_id in step["finished"])
    after = [step for step in steps if step["step"] > ended and step["seqs"]]
    assert len(after[0]["seqs"]) == 4, "and left them running"


async def long_stream(served: Served, prompt: str) -> Answer:
    return await generate(
        served.grpc_url, MODEL, prompt, temperature=0, max_tokens=512, ignore_eos=True
    )


async def until_running(served: Served, start: int, count: int) -> None:
    for _ in range(600):
        steps = served.steps()[start:]
        if steps and sum(item["samples"] for item in steps[-1]["seqs"]) >= count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the long streams never ran together")


def steps_of_new_sequence(steps: list[dict]) -> int:
    """The sequence that joined last is the newcomer."""
    return max(seq_id for step in steps for seq_id in step["added"])


async def test_64_concurrent_streams_each_finish_once(served: Served) -> None:
    before = served.wait_idle()
    answers = await asyncio.gather(
        *(
            generate(
                served.grpc_url, MODEL, f"{WORDS} {i}", max_tokens=8 + i % 25, seed=i, top_p=0.9
            )
            for i in range(64)
        )
    )
    for answer in answers:
        assert answer.error is None
        assert len(answer.finish_reasons) == 1
        assert answer.finish_reasons[0] in ("stop", "length")
    assert served.wait_idle()["free_blocks"] == before["free_blocks"]


async def test_seed_decides_the_text_whatever_else_runs(served: Served) -> None:
    def sampled() -> asyncio.Task[Answer]:
        return asyncio.create_task(
            generate(
                served.grpc_url, MODEL, "My day began when", max_tokens=24, seed=7, temperature=1.0
            )
        )

    alone = await sampled()
    others = [
        asyncio.create_task(generate(served.grpc_url, MODEL, f"{WORDS} {i}", max_tokens=30))
        for i in range(12)
    ]
    among = await asyncio.gather(*(sampled() for _ in range(3)))
    await asyncio.gather(*others)
    assert {answer.text for answer in among} == {alone.text}
    assert alone.text


async def test_cancelling_a_grpc_stream_frees_its_blocks(served: Served) -> None:
    before = served.wait_idle()
    inputs = inputs_of("Count for ever:", True, {"max_tokens": 4000, "ignore_eos": True})
    stream = results(served.grpc_url, MODEL, inputs)
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 3:
            break
    await stream.aclose()
    after = served.wait_idle()
    assert after["free_blocks"] == before["free_blocks"] == after["total_blocks"]
