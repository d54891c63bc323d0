"""Faults that users reported of other LLM servers, asked of ours: aborts, caches, Triton."""

import asyncio
import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from openai_calls import ask
from served import MODEL, Served
from triton_calls import Answer, generate, inputs_of, results, string_input
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

UNIT, E2E = "tests/unit/test_", "tests/e2e/test_"

# Reports of https://github.com/ that other tests hold.
HELD_ELSEWHERE = {
    "vllm-project/vllm/pull/45636": UNIT + "stop.py::test_unrelated_stop_holds_nothing_back",
    "EricLBuehler/mistral.rs/issues/1874": "tests/unit/shim/test_openai_shim.py"
    "::test_failure_mid_stream_is_an_event_then_the_end",
    "vllm-project/vllm/pull/2163": UNIT
    + "kv_sizing.py::test_beyond_the_pool_names_the_setting_that_made_it",
    "vllm-project/vllm/issues/1607": UNIT
    + "engine.py::test_a_pool_too_small_for_all_preempts_and_still_finishes",
    "vllm-project/vllm/issues/4589": UNIT + "sampler.py::test_min_tokens_masks_every_way_to_stop",
    "huggingface/transformers/issues/45419": UNIT
    + "chat_template.py::test_tool_call_with_null_content_is_kept",
    "vllm-project/vllm/pull/55288": UNIT + "text_oracle.py::test_chat_ids_equal",
    "llama-farm/llamafarm/pull/821": UNIT + "tokenizer.py::test_exactly_one_bos",
    "vllm-project/vllm/issues/38946": UNIT
    + "tools.py::test_calls_are_found_however_the_text_is_cut",
    "vllm-project/vllm/issues/5898": E2E + "exactness.py::test_20_prompts_alone_and_at_once",
    "vllm-project/vllm/issues/23138": E2E
    + "scheduling.py::test_seed_decides_the_text_whatever_else_runs",
    "vllm-project/vllm/issues/39863": E2E + "crashes.py::test_killed_stub_is_seen_and_brought_back",
    "kserve/kserve/issues/6259": E2E
    + "crashes.py::test_a_stopped_process_is_not_ready_until_it_goes_on",
    "sgl-project/sglang/issues/6778": UNIT + "scheduler_random.py::test_random_workload",
    "vllm-project/vllm/pull/52470": UNIT
    + "prefix_tree.py::test_a_running_sequence_is_not_its_own_hit",
    "vllm-project/vllm/issues/40004": UNIT
    + "preemption.py::test_the_lowest_and_cheapest_makes_way_and_comes_back_in_its_place",
    "vllm-project/vllm/issues/41951": UNIT + "preemption.py::test_each_time_lifts_its_rank",
    "vllm-project/vllm/issues/24885": E2E + "crashes.py::test_sigterm_drains_open_streams",
    "vllm-project/vllm/issues/12201": UNIT
    + "structured_output.py::test_a_keyword_is_enforced_or_refused_by_name",
    "triton-inference-server/server/issues/5381": E2E
    + "crashes.py::test_killed_stub_is_seen_and_brought_back",
}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("report", HELD_ELSEWHERE)
def test_what_other_tests_hold_is_still_there(report: str) -> None:
    path, name = HELD_ELSEWHERE[report].split("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_a_hit_gives_the_text_of_a_miss(served: Served) -> None:
    """tenstorrent/vllm issue 415."""
    prompt = f"{time.time_ns()}: name five rivers, and say where each of them ends. " * 4
    miss, hit = (ask(served, "text", prompt=prompt, max_tokens=24) for _ in range(2))
    assert miss.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert hit.usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert hit.only == miss.only


async def test_what_an_abort_leaves_does_no_harm(served: Served) -> None:
    """SGLang pull 28374: keys and values of a prompt cut short were taken for whole ones."""
    prompt = new_prompt(700)  # two steps of prefill
    start = len(served.steps())
    aborted = asyncio.create_task(generate(served.grpc_url, MODEL, prompt, max_tokens=4))
    while not any(step["seqs"] for step in served.steps()[start:]):
        await asyncio.sleep(0.01)
    aborted.cancel()
    await asyncio.gather(aborted, return_exceptions=True)
    served.wait_idle(60)
    options = {"temperature": 0, "max_tokens": 6}
    after = await generate(served.grpc_url, MODEL, prompt, **options)
    fresh = await own_cache(served, prompt, **options)
    assert after.token_ids == fresh.token_ids


def new_prompt(num_tokens: int) -> list[int]:
    """Token ids that no cache holds."""
    return random.Random(time.time_ns()).choices(range(1000, 40_000), k=num_tokens)


async def own_cache(served: Served, prompt: list[int], **sampling: Any) -> Answer:
    """The answer of a request that shares no cached prefix."""
    answer = Answer()
    inputs = inputs_of(prompt, False, sampling)
    salt = {"cache_salt": str(time.time_ns())}
    async for result in results(served.grpc_url, MODEL, inputs, parameters=salt):
        answer.token_ids += [int(token) for token in result.as_numpy("token_ids").reshape(-1)]
    return answer


async def test_a_long_prompt_stalls_no_running_stream(served: Served) -> None:
    """vLLM issue 1026: beside each part of the prompt, the stream must get its token."""
    start = len(served.steps())
    story = asyncio.create_task(
        generate(served.grpc_url, MODEL, "Once", max_tokens=60, ignore_eos=True)
    )
    while len(served.steps()) < start + 3:
        await asyncio.sleep(0.01)
    long = new_prompt(800)
    await generate(served.grpc_url, MODEL, long, max_tokens=1)
    await story
    steps = [step for step in served.steps()[start:] if len(step["seqs"]) == 2]
    assert len(steps) >= 2
    for step in steps:
        assert sum(item["num_tokens"] for item in step["seqs"]) <= 512
        assert any(item["num_tokens"] == 1 and item["samples"] for item in step["seqs"])


def test_health_answers_while_megabytes_are_refused(served: Served) -> None:
    """vLLM issue 24910: a prompt of 5 to 27 MB froze health checks for up to half a minute."""
    statuses: list[int] = []

    def flood() -> None:
        for prompt in ("word " * 700_000, "0" * 3_900_000, "é" * 600_000, "x" * 20_000_000):
            statuses.append(ask(served, "text", prompt=prompt).status)

    thread = threading.Thread(target=flood)
    thread.start()
    while thread.is_alive():
        assert httpx.get(f"{served.openai_url}/health/ready", timeout=5).status_code == 200
        time.sleep(0.05)
    assert statuses == [400, 400, 400, 413]


def counters(served: Served) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{served.metrics_port}/metrics", timeout=10).text
    found = re.findall(r"^(shoal_\w+_total\{[^}]*\}) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def test_cancels_at_any_moment_leave_all_as_it_was(served: Served) -> None:
    """Triton issues 6576, 7368, 8034: a cancel that raced with the answer's end was a segfault.

    vLLM issues 26372, 43031: a counter that would have gone down ended streams.
    """
    before, counted = served.wait_idle(60), counters(served)
    workers = {process.pid for process in served.descendants()}

    async def cancelled(index: int) -> None:
        call = generate(served.grpc_url, MODEL, f"Race {index % 7}", max_tokens=1 + index % 3)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call, 0.002 * index)

    async def hung_up(index: int) -> None:
        body = {"text_input": f"Race {index % 5}", "stream": True, "max_tokens": 4}
        url = f"{served.triton_url}/v2/models/{MODEL}/generate_stream"
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", url, json=body) as reply,
        ):
            async for _ in reply.aiter_raw():
                if index % 2:
                    break

    await asyncio.gather(*map(cancelled, range(100)), *map(hung_up, range(12)))
    after = served.wait_idle(60)
    assert after["free_blocks"] == before["free_blocks"] == after["total_blocks"]
    assert {process.pid for process in served.descendants()} == workers
    assert all(
        value >= counted[name] for name, value in counters(served).items() if name in counted
    )


MEMORY_SLACK = 12 << 20  # bytes; allocators keep some


def resident(served: Served, *needles: str) -> int:
    return int(served.find_process(*needles).memory_info().rss)


async def test_memory_stays_flat(served: Served) -> None:
    """vLLM issue 44175 (unique prompts); Triton issues 6270 and 7481 (decoupled errors)."""
    processes = [("shoal.backend.worker",), ("triton_python_backend_stub",), ("bin/tritonserver",)]

    async def one(index: int) -> None:
        if index % 2:
            await generate(served.grpc_url, MODEL, [index % 40_000 + 1, 7, 9], max_tokens=1)
        else:
            answer = await generate(served.grpc_url, MODEL, "Hi", temperature=-1)
            assert answer.error is not None

    async def rounds(start: int) -> None:
        for first in range(start, start + 240, 48):
            await asyncio.gather(*map(one, range(first, first + 48)))

    await rounds(0)
    shared = psutil.disk_usage("/dev/shm").used
    before = [resident(served, *needles) for needles in processes]
    await rounds(10_000)
    for needles, old in zip(processes, before, strict=True):
        assert resident(served, *needles) - old < MEMORY_SLACK, needles
    assert psutil.disk_usage("/dev/shm").used - shared < MEMORY_SLACK


def tensor(name: str, values: list[Any], kind: str, dtype: Any) -> InferInput:
    made = InferInput(name, [len(values)], kind)
    made.set_data_from_numpy(np.array(values, dtype=dtype))
    return made


USUAL = inputs_of("Hi", True, {"max_tokens": 1})
NAN = [float("nan")]
BAD_TENSORS: dict[str, Callable[[], list[InferInput]]] = {
    "NaN beside": lambda: [*USUAL, tensor("temperature", NAN, "FP32", np.float32)],
    "NaN as ids": lambda: [tensor("input_ids", NAN, "FP32", np.float32), *USUAL[1:]],
    "int32 ids": lambda: [tensor("input_ids", [5], "INT32", np.int32), *USUAL[1:]],
    "no ids": lambda: [tensor("input_ids", [], "INT64", np.int64), *USUAL[1:]],
    "ids far out": lambda: [tensor("input_ids", [-(2**63), 5], "INT64", np.int64), *USUAL[1:]],
    "two streams": lambda: [USUAL[0], tensor("stream", [True, False], "BOOL", bool), *USUAL[2:]],
    "stream of floats": lambda: [USUAL[0], tensor("stream", NAN, "FP32", np.float32), *USUAL[2:]],
    "two texts": lambda: [tensor("text_input", [b"a", b"b"], "BYTES", np.object_), *USUAL[1:]],
    "no text": lambda: [tensor("text_input", [], "BYTES", np.object_), *USUAL[1:]],
    "not UTF-8": lambda: [tensor("text_input", [b"\xff"], "BYTES", np.object_), *USUAL[1:]],
    "text twice": lambda: [*USUAL, string_input("text_input", "Hey")],
}


@pytest.mark.parametrize("name", BAD_TENSORS)
async def test_bad_tensors(served: Served, name: str) -> None:
    """SGLang pull 28153, vLLM issue 7283 over gRPC: refused by Triton or by us, and all goes on."""
    statuses = []
    try:
        async for result in results(served.grpc_url, MODEL, BAD_TENSORS[name]()):
            statuses.append(json.loads(result.as_numpy("error")[0])["status"])
    except InferenceServerException:
        statuses.append(400)
    assert statuses == [400]


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": "NaN"}, "temperature"),
        ({"temperature": "Infinity"}, "temperature"),
        ({"seed": "9" * 20}, "seed"),
        ({"n": "999"}, "n"),
        ({"logit_bias": '{"1": NaN}'}, "logit_bias"),
        ({"logit_bias": "{" * 3000}, "logit_bias"),
        ({"x-shoal-timeout": "NaN"}, "timeout"),
        ({"x-shoal-timeout": "inf"}, "timeout"),
    ],
)
async def test_bad_parameters_over_grpc(
    served: Served, parameters: dict[str, str], param: str
) -> None:
    errors = [
        json.loads(result.as_numpy("error")[0])
        async for result in results(served.grpc_url, MODEL, USUAL, parameters=parameters)
    ]
    assert [(error["status"], error["param"]) for error in errors] == [(400, param)]


@pytest.mark.parametrize("number", ["NaN", "-1.0", '"NaN"', "99999999999999999999"])
def test_bad_numbers_over_tritons_http(served: Served, number: str) -> None:
    """Triton's own JSON reader takes NaN."""
    url = f"{served.triton_url}/v2/models/{MODEL}/generate"
    body = f'{{"text_input": "Hi", "max_tokens": 1, "temperature": {number}}}'
    reply = httpx.post(url, content=body, timeout=30)
    assert reply.status_code == 400
    assert "temperature" in reply.json()["error"]
