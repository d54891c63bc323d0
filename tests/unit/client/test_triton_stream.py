"""The gRPC core against a server that speaks the real protocol."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_pieces import Piece, Request, endless
from fake_triton import MODEL, FakeModel, FakeTriton
from shim_thread import wait_until

from shoal.client.errors import ShoalError, unavailable
from shoal.client.triton_stream import TritonStream
from shoal.client.types import Delta


def silent(request: Request) -> Iterator[Piece]:
    yield Piece("never", delay_s=3600)


async def failure(triton: TritonStream, model: str = MODEL, **arguments: Any) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        async for _ in triton.generate(model, **{"text_input": "hi", **arguments}):
            pass
    return caught.value


async def test_deltas_carry_text_counts_and_finish(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.num_cached_tokens = 2
    stream = triton.generate(
        MODEL, text_input="a b c", sampling={"max_tokens": 3}, return_token_ids=True
    )
    deltas = [delta async for delta in stream]
    assert [delta.text for delta in deltas] == ["w0 ", "w1 ", "w2 "]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    assert deltas[0] == Delta("w0 ", (0,), 1, 3, 2)


async def test_what_the_backend_receives(triton: TritonStream, fake: FakeTriton) -> None:
    messages = [{"role": "user", "content": "grüß 👋"}]
    stream = triton.generate(
        MODEL,
        messages=messages,
        sampling={"temperature": 0.5, "stop": ["x"]},
        request_id="r-1",
        parameters={"tenant": "blue"},
    )
    assert [delta async for delta in stream]
    (request,) = fake.model.requests
    assert request.id == "r-1"
    assert request.parameters == {"tenant": "blue"}
    assert request.sampling == {"temperature": 0.5, "stop": ["x"]}
    assert json.loads(request.inputs["messages"]) == messages
    assert request.inputs["return_error"]
    assert request.inputs["exclude_input_in_output"]


async def test_token_ids_arrive_whole(triton: TritonStream, fake: FakeTriton) -> None:
    assert [delta async for delta in triton.generate(MODEL, input_ids=[5, 6, 70000])]
    assert fake.model.requests[0].inputs["input_ids"] == [5, 6, 70000]


async def test_not_streamed_is_one_delta(triton: TritonStream) -> None:
    deltas = [delta async for delta in triton.generate(MODEL, text_input="hi", stream=False)]
    assert [(delta.text, delta.num_output_tokens) for delta in deltas] == [("w0 w1 w2 w3 ", 4)]


async def test_final_flag_after_the_last_response(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.separate_final = True
    deltas = [delta async for delta in triton.generate(MODEL, text_input="hi")]
    assert deltas[-1].finish_reason == "length"


async def test_error_tensor_becomes_the_same_error(triton: TritonStream, fake: FakeTriton) -> None:
    wire = {
        "message": "Too busy.",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
        "status": 429,
        "retry_after_ms": 1500,
    }
    fake.model.script = lambda request: iter([Piece(error=wire)])
    error = await failure(triton)
    assert (error.status, error.code, error.retry_after_ms) == (429, "queue_full", 1500)
    assert str(error) == "Too busy."


async def test_unknown_model_is_404(triton: TritonStream) -> None:
    error = await failure(triton, model="nope")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("change", [{"loaded": False}, {"stub_alive": False}])
async def test_unready_model_is_503(
    triton: TritonStream, fake: FakeTriton, change: dict[str, bool]
) -> None:
    for name, value in change.items():
        setattr(fake.model, name, value)
    error = await failure(triton)
    assert error.status == 503
    assert error.retry_after_ms


async def test_tritonserver_error_does_not_leak(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.script = lambda request: iter([Piece(triton_error="/opt/x.py line 3")])
    error = await failure(triton)
    assert error.status == 500
    assert "/opt" not in error.message
    assert error.detail == "/opt/x.py line 3"


async def test_stream_without_finish_is_an_error(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.script = lambda request: iter([Piece("half")])
    assert (await failure(triton)).status == 503


async def test_server_gone_mid_stream_is_an_error(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.script = endless
    stream = triton.generate(MODEL, text_input="hi")
    await anext(stream)
    fake.stop()
    with pytest.raises(ShoalError) as caught:
        async for _ in stream:
            pass
    assert caught.value.status == 503


async def test_no_server_is_503() -> None:
    async with TritonStream("127.0.0.1:1") as triton:
        assert (await failure(triton)).status == 503
        assert not await triton.is_live()
        with pytest.raises(ShoalError):
            await triton.models()


@pytest.mark.parametrize("script", [endless, silent])
async def test_close_cancels(triton: TritonStream, fake: FakeTriton, script: Any) -> None:
    fake.model.script = script
    stream = triton.generate(MODEL, text_input="hi")
    waiting = asyncio.create_task(stream.__anext__())
    await asyncio.to_thread(wait_until, lambda: fake.model.requests, "no request")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()
    await asyncio.to_thread(fake.model.requests[0].cancelled.wait, 10)
    assert fake.model.requests[0].cancelled.is_set()
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()


async def test_fail_ends_a_waiting_reader(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.script = silent
    stream = triton.generate(MODEL, text_input="hi")
    waiting = asyncio.create_task(stream.__anext__())
    await asyncio.to_thread(wait_until, lambda: fake.model.requests, "no request")
    stream.fail(unavailable("lost"))
    with pytest.raises(ShoalError, match="lost"):
        await waiting


async def test_timeout_is_504(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.script = silent
    assert (await failure(triton, timeout_s=0.2)).status == 504


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_sampling_without_json_form_is_refused(triton: TritonStream, value: float) -> None:
    error = await failure(triton, sampling={"temperature": value})
    assert (error.status, error.param) == (400, "temperature")


@pytest.mark.parametrize(
    "prompt",
    [
        {"text_input": None},
        {"text_input": "a", "input_ids": [1]},
        {"text_input": "\ud800"},
        {"text_input": None, "input_ids": [2**70]},
        {"text_input": None, "input_ids": [1.5]},
    ],
)
async def test_bad_prompt_is_refused_here(triton: TritonStream, prompt: dict[str, Any]) -> None:
    assert (await failure(triton, **prompt)).status == 400


async def test_64_streams_over_one_connection(triton: TritonStream) -> None:
    async def finish_reasons() -> list[str | None]:
        stream = triton.generate(MODEL, text_input="hi", sampling={"max_tokens": 8})
        return [delta.finish_reason async for delta in stream if delta.finish_reason]

    reasons = await asyncio.gather(*(finish_reasons() for _ in range(64)))
    assert reasons == [["length"]] * 64


async def test_models_and_backends() -> None:
    models = {"fake": FakeModel(), "onnx": FakeModel(is_shoal=False), "off": FakeModel()}
    models["off"].loaded = False
    with FakeTriton(**models) as fake:
        async with TritonStream(fake.url) as triton:
            index = await triton.models()
            assert {info.name: info.ready for info in index} == {
                "fake": True,
                "onnx": True,
                "off": False,
            }
            assert await triton.is_shoal_model("fake")
            assert not await triton.is_shoal_model("onnx")
            with pytest.raises(ShoalError) as caught:
                await triton.is_shoal_model("nope")
            assert caught.value.status == 404


async def test_unload_and_load(triton: TritonStream, fake: FakeTriton) -> None:
    fake.model.stub_alive = False
    await triton.unload_model(MODEL)
    await triton.load_model(MODEL)
    assert (await triton.status(MODEL)).state == "ready"
