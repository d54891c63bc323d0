"""Faults that users reported of other LLM servers, asked of ours: texts, lengths, tools, scores.

Each case is sent whole and streamed, all of a table at once, and both answers must be the same.
Reports that other tests hold: ``HELD_ELSEWHERE`` in test_reported_bugs_life.py.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai_calls import Reply, ask
from reply_checks import (
    Check,
    all_of,
    calls_validly,
    ends_with,
    follows,
    has_no_alternatives,
    has_no_usage,
    has_tokens,
    has_usage_once_at_the_end,
    is_answered,
    is_cut_at,
    is_stopped_in_its_call,
    matches,
    never_calls_half,
    spells_its_tokens,
)
from reported_requests import (
    ASK_NAME,
    COUNT,
    EMOJI,
    ESCAPED,
    FORCED,
    LLAMA_CPP,
    MEASURE,
    NAME,
    PAIR,
    ROUND_TRIP,
    TGI,
    TOOL,
    VLLM,
    as_schema,
    changed,
)
from served import MODEL, Served
from triton_calls import generate

from shoal.backend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Report:
    """One request. ``twin``: what of its body another request has that must be answered alike."""

    link: str
    kind: str
    body: dict[str, Any]
    check: Check
    twin: dict[str, Any] = field(default_factory=dict)


REPORTS = [
    Report(
        VLLM + "issues/3574",
        "text",
        {"prompt": "Here is the English alphabet: ABC", "stop": "DEFGHIJ"},
        is_answered,
        {"stop": None},
    ),
    Report(
        TGI + "issues/1724",
        "chat",
        {"messages": "Count from 1 to 10.", "stop": ["7"], "max_tokens": 60},
        is_cut_at("7"),
        {"stop": None},
    ),
    Report(
        VLLM + "issues/13087",
        "chat",
        {"messages": "Hi", "stop": ["zzz"]},
        is_answered,
        {"stop": None},
    ),
    Report(
        "https://github.com/antonellof/ferrox/issues/124",
        "chat",
        {"messages": EMOJI, "max_tokens": 40, "logprobs": True},
        spells_its_tokens,
    ),
    Report(
        "https://github.com/antonellof/ferrox/issues/124#stop",
        "text",
        {"prompt": "你好你好你好", "stop": ["好"], "logprobs": 2, "max_tokens": 24},
        is_answered,
        {"stop": None},
    ),
    Report(
        LLAMA_CPP + "issues/11738",
        "text",
        {"prompt": EMOJI, "temperature": 1.5, "top_k": 100, "seed": 3, "n": 4, "max_tokens": 30},
        is_answered,
    ),
    Report(
        "https://github.com/BerriAI/litellm/issues/3276",
        "chat",
        {"messages": "Hi", "n": 2, "logprobs": True, "temperature": 1, "seed": 1},
        all_of(is_answered, spells_its_tokens),
    ),
    Report(
        VLLM + "issues/4220",
        "text",
        {"prompt": COUNT, "n": 3, "stop": ["8"], "logprobs": 1, "temperature": 1, "seed": 1},
        all_of(is_answered, spells_its_tokens),
    ),
    *(
        Report(VLLM + f"issues/53269#{limit}", "chat", FORCED | {"max_tokens": limit}, check)
        for limit, check in ((8, never_calls_half), (16, never_calls_half), (24, never_calls_half))
    ),
    Report(VLLM + "issues/58228", "chat", FORCED | {"stop": ["ZSJB"]}, is_stopped_in_its_call),
    Report(VLLM + "issues/10395", "chat", FORCED, calls_validly),
    Report(
        "https://github.com/huggingface/transformers/pull/42157",
        "chat",
        {"messages": "Hi", "max_tokens": 1},
        ends_with("length"),
    ),
    Report(
        VLLM + "issues/19862",
        "text",
        {"prompt": "The capital of France is", "max_tokens": None, "stop": ["."]},
        ends_with("stop"),
    ),
    Report(
        LLAMA_CPP + "issues/13700",
        "chat",
        {"messages": "Hi", "max_completion_tokens": 5, "max_tokens": 9},
        all_of(has_tokens(5, 5), ends_with("length")),
    ),
    Report(
        VLLM + "issues/4589",
        "chat",
        {"messages": "Hi", "ignore_eos": True, "max_tokens": 50},
        all_of(has_tokens(50, 50), ends_with("length")),
    ),
    Report(
        VLLM + "pull/15407",
        "chat",
        {"messages": "Hi", "min_tokens": 30, "max_tokens": 40},
        has_tokens(30, 40),
    ),
    Report(
        "https://github.com/CommandCodeAI/command-code/issues/820",
        "chat",
        {"messages": ASK_NAME},
        is_answered,
        {"messages": changed(ASK_NAME, 1, content=NAME)},
    ),
    Report(
        "https://github.com/cubist38/mlx-openai-server/pull/205",
        "chat",
        {"messages": ROUND_TRIP, "tools": [TOOL]},
        is_answered,
        {"messages": changed(ROUND_TRIP, 1, content="")},
    ),
    Report(
        VLLM + "issues/4795",
        "chat",
        {"messages": "Hi", "logprobs": True},
        has_no_alternatives,
    ),
    Report(
        VLLM + "issues/5334",
        "text",
        {"prompt": "\n1. Carol has 20", "echo": True, "logprobs": 1},
        spells_its_tokens,
    ),
    *(
        # BOS and ends of turns; half a character, at the end, in the middle.
        Report(
            VLLM + f"issues/5334#{ids}",
            "text",
            {"prompt": ids, "echo": True, "logprobs": 1},
            spells_its_tokens,
            {"logprobs": None},
        )
        for ids in ([1, 2, 0], [1], [188], [10, 188, 253, 188])
    ),
    Report(
        VLLM + "issues/5334#alone",
        "text",
        {"prompt": "\n1. Carol has 20", "echo": True, "logprobs": 1, "max_tokens": 0},
        all_of(spells_its_tokens, has_tokens(0, 0)),
    ),
    *(
        Report(
            VLLM + f"pull/2937#{number}",
            "text",
            {"prompt": COUNT, "temperature": number},
            is_answered,
            {"temperature": 0},
        )
        for number in (1e-12, 5e-324, -0.0)
    ),
    Report(
        TGI + "pull/1765",
        "text",
        {"prompt": "tick tock tick tock", "frequency_penalty": 2, "presence_penalty": 2},
        is_answered,
    ),
    Report(
        LLAMA_CPP + "issues/19051",
        "chat",
        {"messages": "Hi", "response_format": as_schema({"type": "string", "pattern": ESCAPED})},
        follows({"type": "string", "pattern": ESCAPED}),
    ),
    Report(
        LLAMA_CPP + "issues/19051#regex",
        "text",
        {"prompt": "Hi", "guided_regex": ESCAPED},
        matches(ESCAPED),
    ),
    Report(
        VLLM + "issues/12201",
        "text",
        {
            "prompt": "Hi",
            "guided_json": PAIR,
            "max_tokens": 60,
        },
        follows(PAIR),
    ),
    Report(
        VLLM + "issues/45592",
        "text",
        {
            "prompt": "Hi",
            "guided_json": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8},
            "max_tokens": 40,
        },
        follows({"type": "string", "pattern": "^[a-z]+$", "maxLength": 8}),
    ),
    Report(
        VLLM + "issues/12201#n",
        "chat",
        {
            "messages": "Hi",
            "response_format": as_schema({"type": "object", "properties": {"a": {"enum": [1]}}}),
            "temperature": 1,
            "seed": 2,
            "n": 3,
            "logprobs": True,
            "logit_bias": {"107": 1},
            "max_tokens": 120,
        },
        spells_its_tokens,
    ),
    Report(
        VLLM + "issues/12201#stop",
        "chat",
        {
            "messages": "Hi",
            "response_format": as_schema(MEASURE),
            "stop": ["ZSJB"],
            "max_tokens": 60,
        },
        is_cut_at("ZSJB"),
    ),
]
STREAMS = [
    (VLLM + "issues/7262", {"include_usage": True}, has_usage_once_at_the_end),
    (VLLM + "pull/36379", {}, has_no_usage),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as threads:
        yield threads


@pytest.fixture(scope="module")
def replies(served: Served, pool: ThreadPoolExecutor) -> dict[str, list[Future[Reply]]]:
    """Of each report: whole, streamed, and its twin's."""
    return {
        report.link: [
            pool.submit(ask, served, report.kind, stream, **body)
            for stream, body in (
                (False, report.body),
                (True, report.body),
                (False, report.body | report.twin),
            )
        ]
        for report in REPORTS
    }


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.link.split(".com/")[1])
def test_reported(report: Report, replies: dict[str, list[Future[Reply]]]) -> None:
    whole, streamed, twin = (future.result() for future in replies[report.link])
    for reply in (whole, streamed):
        assert reply.status == 200, reply.chunks
        report.check(reply)
    check_stream(report.kind, streamed)
    assert streamed.choices == whole.choices
    stops = report.body.get("stop", []) if "stop" in report.twin else []
    for mine, other in zip(whole.choices, twin.choices, strict=True):
        assert mine.text == cut_at(other.text, [stops] if isinstance(stops, str) else stops)
    if not stops:
        assert whole.usage["completion_tokens"] == twin.usage["completion_tokens"]
        assert whole.usage["prompt_tokens"] == twin.usage["prompt_tokens"]


def cut_at(text: str, stops: list[str]) -> str:
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def check_stream(kind: str, reply: Reply) -> None:
    """Its events end; none after the first is empty; each choice finishes once."""
    assert reply.ended
    assert all(len(choice.finish_reasons) == 1 for choice in reply.choices)
    opened: set[int] = set()
    for chunk in reply.chunks:
        for item in chunk["choices"]:
            if kind == "chat" and item["index"] not in opened:
                assert item["delta"] == {"role": "assistant", "content": ""}
                opened.add(item["index"])
                continue
            said = item.get("text") or any((item.get("delta") or {}).values())
            assert said or item["logprobs"] or item["finish_reason"]


@pytest.mark.parametrize(("link", "options", "check"), STREAMS)
def test_usage_of_streams(served: Served, link: str, options: dict[str, Any], check: Check) -> None:
    for kind, prompt in (("chat", {"messages": "Hi"}), ("text", {"prompt": "Hi"})):
        check(ask(served, kind, True, **prompt, max_tokens=3, stream_options=options))


def test_penalties_are_obeyed_and_leave_neighbours_alone(
    served: Served, pool: ThreadPoolExecutor
) -> None:
    """TGI pull 1765, vllm-metal pull 69, SGLang issue 28179; vLLM issue 5898 of a batch's size."""
    body = {"prompt": "tick tock tick tock", "max_tokens": 20}
    alone = ask(served, "text", **body).only.text
    wants = [{}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.8}, {"presence_penalty": 2.0}]
    together = [pool.submit(ask, served, "text", **body, **want) for want in wants * 4]
    texts = [future.result().only.text for future in together]
    assert set(texts[::4]) == {alone}
    for index in (1, 2, 3):
        assert len(set(texts[index::4])) == 1
        assert texts[index] != alone


def test_a_message_is_continued_the_same_each_time(served: Served) -> None:
    """vLLM issues 10111, 7681, 19285: with a prefix cache, the second call differed or failed."""
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    replies = [
        ask(served, "chat", stream, messages=messages, continue_final_message=True)
        for stream in (False, False, True)
    ]
    assert len({reply.only.text for reply in replies}) == 1
    assert replies[0].only.text.startswith(" Paris")
    assert replies[0].usage["prompt_tokens"] == replies[1].usage["prompt_tokens"]
    assert replies[1].usage["prompt_tokens_details"]["cached_tokens"] > 0


GRPC = [
    {"stop": ["9"], "max_tokens": 30},  # tensorrtllm_backend issue 128
    {"stop": "8, 9", "max_tokens": 30},
    {"max_tokens": 1},
    {"max_tokens": None, "stop": ["9"]},
    {"max_completion_tokens": 5, "max_tokens": 9},
    {"temperature": 1e-12},
    {"guided_regex": "[a-c]{3}"},
    {"ignore_eos": True, "max_tokens": 25},
]


@pytest.mark.parametrize("sampling", GRPC)
async def test_grpc_answers_as_http_does(served: Served, sampling: dict[str, Any]) -> None:
    expected = ask(served, "text", prompt=COUNT, **sampling)
    for stream in (False, True):
        settings = {"temperature": 0, "max_tokens": 16, **sampling}
        answer = await generate(served.grpc_url, MODEL, COUNT, stream, **settings)
        assert answer.text == expected.only.text
        assert answer.finish_reasons == [expected.only.finish_reason]
        assert answer.num_output_tokens == expected.usage["completion_tokens"]


async def test_streamed_text_is_the_decoded_ids(served: Served, smollm2_path: Path) -> None:
    """ferrox issue 124, exo pull 1691: characters of several tokens came as U+FFFD."""
    tokenizer = Tokenizer.from_checkpoint(smollm2_path)
    answer = await generate(served.grpc_url, MODEL, EMOJI * 3, temperature=0, max_tokens=40)
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special=True)
    assert len(answer.text.encode()) > len(answer.text)
