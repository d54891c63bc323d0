"""/v1/responses over real HTTP: the official client, its types, and turns that are stored."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_pieces import Piece, Request, echo_script
from fake_triton import MODEL, FakeModel, FakeTriton
from openai.types.responses import Response, ResponseStreamEvent
from openai_shapes import check, sse_events
from shim_thread import ShimThread

from shoal.client.errors import ShoalError
from shoal.client.openai.response_store import ResponseStore

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


def entry(text: str) -> dict[str, Any]:
    candidate = {"logprob": -0.5, "rank": 1, "decoded_token": text, "bytes": list(text.encode())}
    return {"7": candidate}


def thinking_and_calling(request: Request) -> Iterator[Piece]:
    yield Piece(reasoning="hm")
    yield Piece(reasoning=" hm")
    yield Piece("I ", logprobs=(entry("I "),))
    yield Piece("call", logprobs=(entry("call"),))
    call = {"index": 0, "id": "call_1", "name": "weather", "arguments": ""}
    yield Piece(tool_calls=(call,))
    for part in ('{"city":', '"Rome"}'):
        yield Piece(tool_calls=({"index": 0, "id": None, "name": None, "arguments": part},))
    yield Piece(finish_reason="tool_calls")


def nothing(request: Request) -> Iterator[Piece]:
    yield Piece(finish_reason="stop")


SCRIPTS = {"echo": echo_script, "calls": thinking_and_calling, "nothing": nothing}


@pytest.fixture(scope="module")
def running(triton: FakeTriton) -> Iterator[ShimThread]:
    with ShimThread(triton.url, max_stored_responses=100) as shim:
        shim.wait_ready()
        yield shim


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


def test_with_the_official_client(client: openai.OpenAI, model: FakeModel) -> None:
    answer = client.responses.create(
        model=MODEL, input="hi", instructions="be kind", max_output_tokens=2, temperature=0.5
    )
    assert answer.output_text == "w0 w1 "
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2
    (request,) = model.requests
    messages = json.loads(request.inputs["messages"])
    assert [message["role"] for message in messages] == ["system", "user"]
    assert request.sampling == {"max_completion_tokens": 2, "temperature": 0.5}


def test_stream_with_the_official_client(client: openai.OpenAI, model: FakeModel) -> None:
    model.script = thinking_and_calling
    with client.responses.stream(model=MODEL, input="hi", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "I call"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == '{"city":"Rome"}'  # type: ignore[union-attr]


def test_order_of_events(http: httpx.Client) -> None:
    events = sse_events(http.post(PATH, json=body(stream=True, max_output_tokens=2)).text)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "metadata": {"a": "b"}},
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}},
    ],
)
def test_answers_have_the_official_shapes(
    http: httpx.Client, model: FakeModel, script: str, fields: dict[str, Any]
) -> None:
    model.script = SCRIPTS[script]
    whole = http.post(PATH, json=body(**fields))
    assert whole.status_code == 200, whole.text
    check(Response, without_store(whole.json()))
    events = sse_events(http.post(PATH, json=body(stream=True, **fields)).text)
    for event in events:
        if "response" in event:
            event["response"] = without_store(event["response"])
        check(ResponseStreamEvent, event)
    last = events[-1]["response"]

    def said(response: dict[str, Any]) -> list[Any]:
        kept = ("type", "status", "content", "arguments", "name")
        return [{k: item[k] for k in kept if k in item} for item in response["output"]]

    assert said(last) == said(whole.json())
    assert last["usage"] == whole.json()["usage"]


def without_store(response: dict[str, Any]) -> dict[str, Any]:
    """OpenAI answers with ``store``, which the client's type does not have."""
    return {name: value for name, value in response.items() if name != "store"}


def test_items_become_messages(http: httpx.Client, model: FakeModel) -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ]
    assert http.post(PATH, json=body(input=items)).status_code == 200
    messages = json.loads(model.requests[-1].inputs["messages"])
    assert [message["role"] for message in messages] == ["developer", "user", "assistant", "tool"]
    assert messages[1]["content"] == [{"type": "text", "text": "a"}]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "1"}


@pytest.mark.parametrize("stream", [False, True])
def test_going_on_from_an_earlier_response(
    http: httpx.Client, model: FakeModel, stream: bool
) -> None:
    model.script = thinking_and_calling
    response = http.post(PATH, json=body(instructions="first", stream=stream))
    first = sse_events(response.text)[-1]["response"] if stream else response.json()
    assert http.get(f"{PATH}/{first['id']}").json() == first
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    second = http.post(PATH, json=body(input=[result], previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    messages = json.loads(model.requests[-1].inputs["messages"])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["content"] == "I call"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Rome"}'
    assert http.delete(f"{PATH}/{first['id']}").json()["deleted"] is True
    gone = http.post(PATH, json=body(previous_response_id=first["id"]))
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")
    third = http.post(PATH, json=body(previous_response_id=second["id"]))  # stands on its own
    assert third.status_code == 200


def test_what_is_not_stored_and_whose_it_is(http: httpx.Client) -> None:
    unstored = http.post(PATH, json=body(store=False)).json()
    assert http.get(f"{PATH}/{unstored['id']}").status_code == 404
    own = {"x-shoal-tenant": "a"}
    stored = http.post(PATH, json=body(), headers=own).json()
    assert http.get(f"{PATH}/{stored['id']}").status_code == 404
    assert http.get(f"{PATH}/{stored['id']}", headers=own).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"nope": 1}}, "text.nope"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
    ],
)
def test_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json=body(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_sampling_beyond_openais_is_that_of_chats(http: httpx.Client, model: FakeModel) -> None:
    fields = {
        "min_p": 0.1,
        "typical_p": 0.9,
        "stop": None,
        "stop_token_ids": [3],
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"5": 1.0},
    }
    assert http.post(PATH, json=body(**fields)).status_code == 200
    sent = json.loads(model.requests[-1].inputs["sampling_parameters"])
    assert {name: sent.get(name) for name in fields} == fields


def test_pictures_and_refusals_are_parts_of_a_turn(http: httpx.Client, model: FakeModel) -> None:
    look = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "data:x", "detail": "auto"},
    ]
    turns = [
        {"role": "user", "content": look},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert http.post(PATH, json=body(input=turns)).status_code == 200
    sent = json.loads(model.requests[-1].inputs["messages"])
    picture = {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}
    assert sent[0]["content"] == [{"type": "text", "text": "a"}, picture]
    assert sent[1]["content"] == [{"type": "text", "text": "No."}]


def test_refusals_of_the_backend_use_the_callers_names(
    http: httpx.Client, model: FakeModel
) -> None:
    error = {"message": "max_completion_tokens is bad", "status": 400}
    error["param"] = "max_completion_tokens"
    model.script = lambda request: iter([Piece(error=error)])
    answer = http.post(PATH, json=body(stream=True))
    assert answer.json()["error"]["param"] == "max_output_tokens"
    assert answer.json()["error"]["message"] == "max_output_tokens is bad"


def test_failure_mid_stream(http: httpx.Client, model: FakeModel) -> None:
    broken = {"message": "worker died", "status": 500}
    model.script = lambda request: iter([Piece("a"), Piece(error=broken)])
    last = sse_events(http.post(PATH, json=body(stream=True)).text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "worker died"}
    last["response"] = without_store(last["response"])
    check(ResponseStreamEvent, last)


def test_the_store_is_bounded() -> None:
    now = [0.0]
    store = ResponseStore(2, 100, 10.0, lambda: now[0])
    for name in "abc":
        store.put(name, b"x", [], "")
    assert len(store) == 2
    with pytest.raises(ShoalError):
        store.get("a", "")
    store.put("d", b"x" * 97, [], "")  # makes room for itself
    assert (len(store), store.num_bytes) == (1, 99)
    store.put("e", b"x" * 101, [], "")  # too much alone
    assert store.get("d", "").body == b"x" * 97
    now[0] = 11.0
    with pytest.raises(ShoalError):
        store.get("d", "")
    assert store.num_bytes == 0
