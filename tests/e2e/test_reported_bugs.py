"""Faults that users reported of other LLM servers, asked of ours: texts, lengths, tools, scores.

Each case is sent whole and streamed, all of a table at once, and both answers must be the same.
Reports that other tests hold: ``HELD_ELSEWHERE`` in test_reported_bugs_life.py.
"""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai_calls import Reply, ask, send
from served import MODEL, Served
from triton_calls import generate

from shoal.backend.text.tokenizer import Tokenizer

VLLM = "https://github.com/vllm-project/vllm/"
LLAMA_CPP = "https://github.com/ggml-org/llama.cpp/"
TGI = "https://github.com/huggingface/text-generation-inference/"

Check = Callable[[Reply], None]


@dataclass(frozen=True)
class Report:
    """One request. ``twin``: what of its body another request has that must be answered alike."""

    link: str
    kind: str
    body: dict[str, Any]
    check: Check
    twin: dict[str, Any] = field(default_factory=dict)


def ends_with(reason: str) -> Check:
    def check(reply: Reply) -> None:
        assert {choice.finish_reason for choice in reply.choices} == {reason}

    return check


def is_cut_at(*stops: str) -> Check:
    """The twin has no stop strings: of its text, what precedes the first must be there."""

    def check(reply: Reply) -> None:
        assert reply.only.finish_reason == "stop"
        assert not any(stop in reply.only.text for stop in stops)

    return check


def has_tokens(low: int, high: int) -> Check:
    def check(reply: Reply) -> None:
        if not is_streamed(reply):
            assert low <= reply.usage["completion_tokens"] <= high

    return check


def spells_its_tokens(reply: Reply) -> None:
    for choice in reply.choices:
        tokens = choice.tokens or [entry["token"] for entry in choice.logprobs]
        assert tokens
        assert "".join(tokens) == choice.text
        starts = [len("".join(tokens[:index])) for index in range(len(tokens))]
        assert choice.text_offset in ([], starts)


def has_no_alternatives(reply: Reply) -> None:
    spells_its_tokens(reply)
    assert all(entry["top_logprobs"] == [] for entry in reply.only.logprobs)


def has_usage_once_at_the_end(reply: Reply) -> None:
    *others, last = reply.chunks
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0
    assert [chunk["usage"] for chunk in others] == [None] * len(others)


def has_no_usage(reply: Reply) -> None:
    assert not any("usage" in chunk for chunk in reply.chunks)


def calls_validly(reply: Reply) -> None:
    choice = reply.only
    assert (choice.finish_reason, choice.text) == ("tool_calls", "")
    for name, arguments in choice.calls:
        assert name == "measure"
        jsonschema.validate(json.loads(arguments), MEASURE)


def never_calls_half(reply: Reply) -> None:
    choice = reply.only
    if choice.finish_reason == "tool_calls":
        calls_validly(reply)
    elif not is_streamed(reply):
        tokens = reply.usage["completion_tokens"]
        assert choice.finish_reason == "length"
        assert tokens in (8, 16, 24, 40)


def is_stopped_in_its_call(reply: Reply) -> None:
    choice = reply.only
    assert choice.finish_reason == "stop"
    assert choice.calls[0][1].endswith('"')
    assert "ZSJB39" not in choice.calls[0][1]


def follows(schema: dict[str, Any]) -> Check:
    def check(reply: Reply) -> None:
        for choice in reply.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), schema)

    return check


def matches(pattern: str) -> Check:
    def check(reply: Reply) -> None:
        assert re.fullmatch(pattern, reply.only.text)

    return check


def is_answered(reply: Reply) -> None:
    assert all(choice.finish_reason in ("stop", "length") for choice in reply.choices)


def all_of(*checks: Check) -> Check:
    def check(reply: Reply) -> None:
        for item in checks:
            item(reply)

    return check


def is_streamed(reply: Reply) -> bool:
    return "chunk" in reply.chunks[0]["object"] or not reply.chunks[0].get("usage")


MEASURE = {
    "type": "object",
    "properties": {
        "ratio": {"type": "number", "minimum": 0.25, "maximum": 2.5},
        "code": {"enum": ["ZSJB39"]},
    },
    "required": ["code", "ratio"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": MEASURE}}
FORCED = {
    "messages": "Measure it.",
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 90,
}
PAIR = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
COUNT = "1, 2, 3, 4, 5,"
EMOJI = "Answer only 🤗👩\u200d👩\u200d👧 你好"
ESCAPED = r"^hello there indeed\\!$"
NAME = "my name is Bo"
ASK_NAME = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": [{"type": "text", "text": NAME}]},
    {"role": "user", "content": "What is your name?"},
]
CALL = {"name": "measure", "arguments": '{"code": "ZSJB39", "ratio": 1}'}
ROUND_TRIP = [
    {"role": "user", "content": "Measure it."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "It is 7."},
]


def changed(messages: list[dict[str, Any]], index: int, **fields: Any) -> list[dict[str, Any]]:
    return [item | fields if place == index else item for place, item in enumerate(messages)]


def as_schema(schema: dict[str, Any]) -> dict[str, Any]:
    wrapper = {"name": "x", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": wrapper}


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


# Kind, body, the param and code of the refusal.
REFUSED: list[tuple[str, str, dict[str, Any], str, str | None]] = [
    (LLAMA_CPP + "issues/14566", "chat", {"messages": "word " * 9000}, "messages", "context"),
    (TGI + "issues/2749", "text", {"prompt": "word " * 9000}, "prompt", "context"),
    (VLLM + "issues/1543", "text", {"max_tokens": 10**9, "ignore_eos": True}, "max_tokens", None),
    *(
        (VLLM + "issues/7283", "text", {"prompt": prompt}, "prompt", None)
        for prompt in ("", [""], ["a", ""], [[], [1]], None, [None], {}, [[True]], [1, "a"])
    ),
    *(
        (VLLM + "pull/16529", "text", {"logit_bias": bias}, "logit_bias", None)
        for bias in ({"999999": 5}, {"-1": 1}, {"x": 1}, {"9" * 5000: 1}, {"1": 1e308}, [1])
    ),
    *(
        ("https://github.com/sgl-project/sglang/pull/28153", "text", fields, next(iter(fields)), "")
        for fields in (
            {"repetition_penalty": 1e-300},
            {"top_k": -1},
            {"max_tokens": 10**30},
            {"max_tokens": 1e9},
            {"seed": 2**63},
            {"n": 10**30},
            {"stop_token_ids": [10**20]},
        )
    ),
    *(
        (LLAMA_CPP + "pull/26602", "text", fields, next(iter(fields)), "")
        for fields in (
            {"guided_regex": "(" * 60_000 + "a" + ")" * 60_000},
            {"guided_grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000},
            {"guided_json": '{"items":' * 600 + "{}" + "}" * 600},
            {"guided_json": '{"enum": [NaN]}'},
        )
    ),
    *(
        (
            VLLM + "issues/10395",
            "chat",
            FORCED | {"tools": [{"type": "function", "function": {"name": "f", "parameters": p}}]},
            "tools",
            "",
        )
        for p in ({"type": "string"}, {"properties": {"a": {"$ref": "#/$defs/none"}}})
    ),
]


@pytest.mark.parametrize(("link", "kind", "body", "param", "code"), REFUSED)
def test_refused(
    served: Served, link: str, kind: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    usual = {"messages": "Hi"} if kind == "chat" else {"prompt": "Hi"}
    for stream in (False, True):
        reply = ask(served, kind, stream, **usual | body)
        assert reply.status == 400, reply.chunks
        assert reply.error["param"].startswith(param)
        assert code != "context" or reply.error["code"] == "context_length_exceeded"


BODY = f'"model": "{MODEL}", "prompt": "Hi", "max_tokens": 1'


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (f'{{{BODY}, "temperature": NaN}}', 400, "temperature"),
        (f'{{{BODY}, "temperature": -1}}', 400, "temperature"),
        (f'{{{BODY}, "top_p": Infinity}}', 400, "top_p"),
        (f'{{{BODY}, "logit_bias": {{"1": NaN}}}}', 400, "logit_bias.1"),
        (f'{{{BODY}, "seed": {"1" * 400}}}', 400, None),
        (f'{{{BODY}, "stop": "\\ud83e"}}', 400, None),
        ("\ufeff{" + BODY + "}", 400, None),
        ("[" * 50_000, 400, None),
        ("", 400, None),
        (f'{{{BODY}, "model": "nobody"}}', 404, "model"),  # of two the last counts
        (f'{{"model": "nobody", {BODY}}}', 200, None),
    ],
)
def test_bodies_that_are_hardly_json(
    served: Served, body: str, status: int, param: str | None
) -> None:
    """SGLang pull 28153: NaN passes a range check that asks what must not be."""
    reply = send(served, "text", body)
    assert reply.status == status
    if status != 200:
        assert reply.error["param"] == param


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("", 415),
        ("text/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415),
        ("application/jsonx", 415),
    ],
)
def test_media_types(served: Served, media_type: str, status: int) -> None:
    """vLLM issue 11171: no content type was an error 500."""
    reply = send(served, "text", "{" + BODY + "}", **{"content-type": media_type})
    assert reply.status == status


def test_arguments_of_earlier_calls_may_be_anything(served: Served) -> None:
    """transformers issue 45419: arguments are parsed for the template, and may be no JSON."""
    for arguments in ('{"a":"\\ud800"}', '{"a":NaN}', '{"a":' * 40, {"a": [1]}, None):
        call = {"id": "c1", "type": "function", "function": CALL | {"arguments": arguments}}
        messages = changed(ROUND_TRIP, 1, tool_calls=[call])
        reply = ask(served, "chat", messages=messages, max_tokens=1)
        assert reply.status == 200, (arguments, reply.chunks)
