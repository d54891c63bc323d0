"""Endpoints beside completions, over the whole stack: HTTP, and gRPC where it makes sense."""

import json
import math
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.responses import Response, ResponseStreamEvent
from openai_shapes import check, sse_events
from served import Served

from shoal.client.triton_stream import TritonStream

MODEL = "smollm2-135m-instruct"
TEXT = "The café is closed. 🙂 <|im_end|>"


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.openai_url, timeout=60) as client:
        yield client


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.openai_url}/v1", api_key="none") as made:
        yield made


async def test_tokenize_and_back(served: Served, http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": TEXT, "return_token_strs": True}
    tokens = http.post("/tokenize", json=body).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    back = http.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": TEXT}
    async with TritonStream(served.grpc_url) as triton:
        again = await triton.tokenize(MODEL, text_input=TEXT)
        assert again["tokens"] == tokens["tokens"]
        assert await triton.detokenize(MODEL, again["tokens"]) == TEXT
    chat = [{"role": "user", "content": "hi"}]
    counted = http.post("/tokenize", json={"model": MODEL, "messages": chat}).json()["count"]
    body = {"model": f"{MODEL}@1", "messages": chat, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == counted


def test_embeddings(client: openai.OpenAI, http: httpx.Client) -> None:
    texts = ["A cat sits on the mat.", "A kitten is on a rug.", "Interest rates rose by 2 %."]
    for pooling in ("mean", "last"):
        made = client.embeddings.create(model=MODEL, input=texts, extra_body={"pooling": pooling})
        vectors = [item.embedding for item in made.data]
        assert {len(vector) for vector in vectors} == {576}
        assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-5) for vector in vectors)
    alone = client.embeddings.create(model=MODEL, input=texts[0], dimensions=64)
    assert len(alone.data[0].embedding) == 64
    long = "word " * 1500  # several chunks
    body = {"model": MODEL, "input": [long, long[:-5] + "end"], "pooling": "mean"}
    answer = http.post("/v1/embeddings", json=body).json()
    check(CreateEmbeddingResponse, answer)
    first, second = (item["embedding"] for item in answer["data"])
    assert first != second
    assert sum(a * b for a, b in zip(first, second, strict=True)) > 0.99


def test_responses(client: openai.OpenAI, http: httpx.Client) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input="My name is Ada. Say hello.", **asked)
    assert first.output_text
    with client.responses.stream(
        input="What is my name?", previous_response_id=first.id, **asked
    ) as stream:
        events = list(stream)
    deltas = [item.delta for item in events if item.type == "response.output_text.delta"]
    final = events[-1].response  # completed, or incomplete where max_output_tokens cut it
    assert "".join(deltas) == final.output_text
    assert final.usage is not None
    assert first.usage is not None
    assert final.usage.input_tokens > first.usage.input_tokens
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    body = {
        "model": MODEL,
        "input": "Choose.",
        "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}},
    }
    answer = http.post("/v1/responses", json=body).json()
    answer.pop("store")
    check(Response, answer)
    text = answer["output"][0]["content"][0]["text"]
    assert json.loads(text)["n"] in (1, 2)
    for event in sse_events(http.post("/v1/responses", json={**body, "stream": True}).text):
        if "response" in event:
            event["response"].pop("store")
        check(ResponseStreamEvent, event)


def test_going_on_with_the_last_message(http: httpx.Client) -> None:
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "1, 2, 3, 4, 5,"},
    ]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True}
    body |= {"max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert "6" in answer["choices"][0]["message"]["content"]
