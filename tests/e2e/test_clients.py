"""Each way in that the README names, against the real server."""

import json
import shutil
import socket
import subprocess
import time
from typing import Any

import httpx
import openai
import pytest
from served import MODEL, Served
from triton_calls import generate
from typescript_sdk import needs_node, run_vitest

from shoal.client.sdk import AsyncClient, Client

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def openai_client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.openai_url}/v1", api_key="none", max_retries=0)


def test_openai_chat_streams(openai_client: openai.OpenAI) -> None:
    stream = openai_client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        stream=True,
        temperature=0,
        max_tokens=48,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert len([c for c in chunks if c.choices]) > 5, "it must arrive in pieces"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] in (["stop"], ["length"])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 5


def test_openai_chat_whole_equals_streamed(openai_client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    whole = openai_client.chat.completions.create(**options)
    stream = openai_client.chat.completions.create(**options, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    again = openai_client.chat.completions.create(**options)
    assert again.usage.prompt_tokens_details.cached_tokens == 36, "all but the last of 37"


def test_openai_completions(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_openai_lists_the_model(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]


def test_curl_on_the_openai_endpoint(served: Served) -> None:
    body = {"model": MODEL, "stream": True, "messages": QUESTION, "temperature": 0}
    lines = curl(f"{served.openai_url}/v1/chat/completions", {**body, "max_tokens": 24})
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "Paris" in "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


def test_curl_on_tritons_generate_stream(served: Served) -> None:
    body = {
        "text_input": "The capital of France is",
        "stream": True,
        "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": 12}),
    }
    lines = curl(f"{served.triton_url}/v2/models/{MODEL}/generate_stream", body)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len(chunks) > 3
    assert "Paris" in "".join(chunk["text_output"] for chunk in chunks)


def test_tritons_generate_takes_messages_and_plain_parameters(served: Served) -> None:
    body = {"messages": json.dumps(QUESTION), "max_tokens": 24, "temperature": 0.0}
    reply = httpx.post(f"{served.triton_url}/v2/models/{MODEL}/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.json()["text_output"]


async def test_tritonclient_aio(served: Served) -> None:
    answer = await generate(served.grpc_url, MODEL, QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in answer.text
    assert answer.num_chunks > 5
    assert len(answer.finish_reasons) == 1


async def test_not_streamed_equals_streamed_over_grpc(served: Served) -> None:
    options = {"temperature": 0, "max_tokens": 32}
    whole = await generate(served.grpc_url, MODEL, QUESTION, stream=False, **options)
    pieces = await generate(served.grpc_url, MODEL, QUESTION, stream=True, **options)
    assert whole.text == pieces.text
    assert whole.token_ids == pieces.token_ids
    assert whole.num_output_tokens == pieces.num_output_tokens


def test_sdk(served: Served) -> None:
    with Client(served.grpc_url, model=MODEL) as client:
        answer = client.generate(QUESTION, temperature=0, max_tokens=32)
        assert "Paris" in answer.text
        with client.stream(QUESTION, temperature=0, max_tokens=32) as stream:
            assert "".join(delta.text for delta in stream) == answer.text


async def test_async_sdk(served: Served) -> None:
    async with AsyncClient(served.grpc_url, model=MODEL) as client:
        answer = await client.generate(QUESTION, temperature=0, max_tokens=32)
        assert "Paris" in answer.text
        async with client.stream(QUESTION, temperature=0, max_tokens=32) as stream:
            assert "".join([delta.text async for delta in stream]) == answer.text


def test_stop_strings_never_leak_over_any_path(
    served: Served, openai_client: openai.OpenAI
) -> None:
    options = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 40}
    free = openai_client.completions.create(**options).choices[0].text
    stop = free.strip()[4:9]
    chunks = list(openai_client.completions.create(**options, stop=stop, stream=True))
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == free[: free.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_client_that_hangs_up_frees_its_blocks(served: Served) -> None:
    """The OpenAI stream, the OpenAI whole answer, and Triton's own HTTP stream."""
    before = served.wait_idle()
    endless = {"model": MODEL, "prompt": "Count:", "max_tokens": 4000}
    for stream in (True, False):
        hang_up(f"{served.openai_url}/v1/completions", {**endless, "stream": stream})
        after = served.wait_idle()
        assert after["free_blocks"] == before["free_blocks"]
    foreign = {"text_input": "Count:", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    hang_up(f"{served.triton_url}/v2/models/{MODEL}/generate_stream", foreign)
    assert served.wait_idle()["free_blocks"] == before["free_blocks"] == before["total_blocks"]


def hang_up(url: str, body: dict) -> None:
    """Send a request, stay until it runs, and close the socket."""
    target = httpx.URL(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((target.host, target.port)) as connection:
        connection.sendall(head.encode() + content)
        time.sleep(0.7)


def curl(url: str, body: dict) -> list[str]:
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    command = ["curl", "-sN", url, "-H", "content-type: application/json", "-d", json.dumps(body)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [line for line in result.stdout.splitlines() if line]


@pytest.mark.parametrize("prompt", ["The capital of France is", [504, 3575, 282], QUESTION])
def test_sdk_gives_the_same_over_http(served: Served, prompt: Any) -> None:
    options = {"max_tokens": 12, "temperature": 0}
    with Client(served.grpc_url, model=MODEL) as direct, Client(served.openai_url) as http:
        wanted = direct.generate(prompt, **options)
        whole = http.generate(prompt, **options)
        with http.stream(prompt, **options) as stream:
            text = "".join(delta.text for delta in stream)
    assert whole.text == text == wanted.text
    assert whole.finish_reason == stream.finish_reason == wanted.finish_reason
    assert whole.usage.total_tokens == stream.usage.total_tokens == wanted.usage.total_tokens


@needs_node
def test_typescript_sdk(served: Served) -> None:
    run_vitest("tests/server.test.ts", SHOAL_TEST_URL=served.openai_url, SHOAL_TEST_MODEL=MODEL)
