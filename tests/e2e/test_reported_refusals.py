"""Requests that users reported other LLM servers to break on: refused by name, or taken."""

from typing import Any

import pytest
from openai_calls import ask, send
from reported_requests import CALL, FORCED, LLAMA_CPP, ROUND_TRIP, TGI, VLLM, changed
from served import MODEL, Served

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
