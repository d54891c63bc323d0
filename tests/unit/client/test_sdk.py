"""The SDK, synchronous and not, against a server that speaks the real protocol."""

import threading
from collections.abc import Iterator

import pytest
from fake_pieces import endless
from fake_triton import MODEL, FakeModel, FakeTriton

from shoal.client.errors import ShoalError
from shoal.client.sdk import AsyncClient, Client
from shoal.client.types import Completion, Usage


@pytest.fixture
def client(fake: FakeTriton) -> Iterator[Client]:
    with Client(fake.url) as connected:
        yield connected


def test_generate(client: Client, fake: FakeTriton) -> None:
    fake.model.num_cached_tokens = 1
    answer = client.generate("a b", max_tokens=2, temperature=0)
    assert answer == Completion("w0 w1 ", "length", Usage(2, 2, 1), (0, 1))
    assert answer.usage.total_tokens == 4
    assert fake.model.requests[0].sampling == {"max_tokens": 2, "temperature": 0}


def test_messages_and_token_ids(client: Client, fake: FakeTriton) -> None:
    client.generate([{"role": "user", "content": "hi"}])
    client.generate([1, 2, 3])
    assert '"hi"' in fake.model.requests[0].inputs["messages"]
    assert fake.model.requests[1].inputs["input_ids"] == [1, 2, 3]


def test_stream(client: Client) -> None:
    with client.stream("a b", max_tokens=3) as stream:
        assert stream.finish_reason is None
        texts = [delta.text for delta in stream]
    assert texts == ["w0 ", "w1 ", "w2 "]
    assert stream.finish_reason == "length"
    assert stream.usage == Usage(2, 3)
    assert stream.completion().text == "w0 w1 w2 "


def test_leaving_a_stream_cancels(client: Client, fake: FakeTriton) -> None:
    fake.model.script = endless
    with client.stream("a") as stream:
        assert next(stream).text == "x"
    assert fake.model.requests[0].cancelled.wait(10)
    assert list(stream) == []


def test_errors_come_out_as_they_are(client: Client) -> None:
    with pytest.raises(ShoalError) as caught:
        client.generate("a", model="nope")
    assert caught.value.status == 404
    with pytest.raises(ShoalError, match="not empty"):
        client.generate([])


def test_models_and_ready(client: Client, fake: FakeTriton) -> None:
    assert [(info.name, info.ready) for info in client.models()] == [(MODEL, True)]
    assert client.ready()
    fake.model.state = "restarting"
    assert not client.ready()


def test_many_threads_share_one_client(client: Client) -> None:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.generate("a", max_tokens=5).text))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["w0 w1 w2 w3 w4 "] * 16


def test_closed_client_says_so(fake: FakeTriton) -> None:
    client = Client(fake.url)
    client.close()
    client.close()
    with pytest.raises(ShoalError, match="closed"):
        client.generate("a")


def test_default_model_must_be_the_only_one() -> None:
    with FakeTriton(a=FakeModel(), b=FakeModel()) as fake, Client(fake.url) as client:
        with pytest.raises(ShoalError, match="a, b"):
            client.generate("x")
        assert client.generate("x", model="b", max_tokens=1).text == "w0 "


async def test_async_client(fake: FakeTriton) -> None:
    async with AsyncClient(fake.url, model=MODEL) as client:
        assert (await client.generate("a", max_tokens=1)).text == "w0 "
        async with client.stream("a", max_tokens=2) as stream:
            assert [delta.text async for delta in stream] == ["w0 ", "w1 "]
        assert await client.ready()


def test_several_choices(client: Client) -> None:
    answer = client.generate("a b", max_tokens=2, n=2)
    assert (answer.text, answer.usage) == ("c0w0 c0w1 ", Usage(2, 2))
    (other,) = answer.others
    assert other == Completion("c1w0 c1w1 c1w2 ", "length", Usage(0, 3), (0, 1, 2))


def test_streamed_choices_say_which_they_are(client: Client) -> None:
    with client.stream("a b", max_tokens=2, n=2) as stream:
        deltas = [(delta.index, delta.text) for delta in stream]
    assert deltas == [(0, "c0w0 "), (1, "c1w0 "), (0, "c0w1 "), (1, "c1w1 "), (1, "c1w2 ")]
    assert stream.usage == Usage(2, 5)
    assert stream.completion().others[0].text == "c1w0 c1w1 c1w2 "
