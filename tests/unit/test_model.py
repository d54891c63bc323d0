"""model.py and codec.py under the real rules of the response sender, over a scripted worker."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_pb_utils
import numpy as np
import pytest
from fake_triton import THREAD_NAME
from scripted_worker import ScriptedWorkers, WorkerScript, scripted_text
from text_builders import make_tokenizer

pb_utils = fake_pb_utils.install()

from shoal.backend import codec, metrics  # noqa: E402
from shoal.backend import model as model_module  # noqa: E402
from shoal.backend.model import TritonPythonModel  # noqa: E402
from shoal.backend.service import Service, TextParts  # noqa: E402
from shoal.backend.text.chat_template import ChatTemplate  # noqa: E402
from shoal.client.types import Heartbeat  # noqa: E402

WAIT_S = 20.0


class Backend:
    """A loaded model and the calls of a client."""

    def __init__(self, model: TritonPythonModel, workers: ScriptedWorkers) -> None:
        self.model = model
        self.workers = workers

    def send(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
        """Send one request; returns its response sender."""
        request = make_request(parameters, **inputs)
        assert self.model.execute([request]) is None
        return request.sender

    def ask(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> list[Any]:
        """Send one request and wait for its final response."""
        return self.send(parameters, **inputs).wait_closed(WAIT_S)


def make_request(parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
    tensors = [make_tensor(name, value) for name, value in inputs.items()]
    return pb_utils.InferenceRequest(tensors, parameters)


def make_tensor(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return pb_utils.Tensor(name, value)
    if isinstance(value, bool):
        return pb_utils.Tensor(name, np.array([value]))
    if isinstance(value, list):
        return pb_utils.Tensor(name, np.array(value, dtype=np.int64))
    data = value if isinstance(value, bytes) else value.encode()
    return pb_utils.Tensor(name, np.array([data], dtype=np.object_))


def start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: ScriptedWorkers,
    settings: str = "weights: fake\n",
    config: dict[str, Any] | None = None,
) -> TritonPythonModel:
    (tmp_path / "models" / "1").mkdir(parents=True)
    (tmp_path / "models" / "1" / "model.yaml").write_text(settings)
    tokenizer = make_tokenizer()
    text = TextParts(tokenizer, ChatTemplate.from_tokenizer(tokenizer))

    def make_service(*arguments: Any) -> Service:
        return Service(*arguments, spawn=workers.spawn, text=text)

    monkeypatch.setattr(model_module, "Service", make_service)
    model = TritonPythonModel()
    model.initialize(
        {
            "model_name": "fake",
            "model_version": "1",
            "model_repository": str(tmp_path / "models"),
            "model_config": json.dumps(config or {}),
        }
    )
    return model


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setattr(model_module, "DRAIN_S", 0.0)
    workers = ScriptedWorkers(WorkerScript(max_num_seqs=64))
    model = start(tmp_path, monkeypatch, workers)
    yield Backend(model, workers)
    model.finalize()


def joined(responses: list[Any]) -> str:
    return "".join(response.value("text_output")[0] for response in responses)


def error_of(responses: list[Any]) -> dict[str, Any]:
    assert len(responses) == 1
    assert responses[0].value("finish_reason") == ["error"]
    return json.loads(responses[0].value("error")[0])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def test_the_configuration_is_complete_and_everything_optional() -> None:
    config = TritonPythonModel.auto_complete_config(pb_utils.ModelConfig()).as_dict()
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert all(item["optional"] for item in config["input"])
    names = {item["name"] for item in config["input"]}
    assert {"text_input", "stream", "sampling_parameters", "exclude_input_in_output"} <= names
    assert {"messages", "input_ids", "control", "return_error"} <= names


def test_a_stream_sends_deltas_and_one_final_flag(backend: Backend) -> None:
    responses = backend.ask({"max_tokens": 9}, text_input="hello", stream=True)
    assert joined(responses) == scripted_text(5, 9)
    assert all(response.value("finish_reason") is None for response in responses)


def test_without_stream_one_response_has_all_and_the_prompt(backend: Backend) -> None:
    responses = backend.ask({"max_tokens": 4}, text_input="hello")
    assert [joined(responses)] == ["hello" + scripted_text(5, 4)]
    assert len(responses) == 1


def test_outputs_come_when_asked_for(backend: Backend) -> None:
    responses = backend.ask(
        text_input="hello",
        stream=True,
        sampling_parameters='{"max_tokens": 6, "logprobs": 1}',
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        return_cached_tokens=True,
        return_token_ids=True,
        return_logprobs=True,
        return_cumulative_logprob=True,
    )
    last = responses[-1]
    assert last.value("finish_reason") == ["length"]
    assert [r.value("finish_reason") for r in responses[:-1]] == [None] * (len(responses) - 1)
    assert last.value("num_input_tokens") == [5]
    assert last.value("cached_tokens") == [0]
    assert sum(r.value("num_output_tokens")[0] for r in responses) == 6
    ids = [token for r in responses for token in r.value("token_ids") or []]
    assert bytes(ids).decode() == scripted_text(5, 6)
    assert last.value("cumulative_logprob") == pytest.approx([-3.0])
    entries = [e for r in responses for e in json.loads((r.value("logprobs") or ["[]"])[0])]
    assert [list(entry) for entry in entries] == [[str(token)] for token in ids]
    assert entries[0][str(ids[0])] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": scripted_text(5, 1),
        "bytes": ids[:1],
    }


def test_messages_and_token_ids_are_prompts_too(backend: Backend) -> None:
    chat = json.dumps([{"role": "user", "content": "Hi"}])
    answer = backend.ask(
        {"max_tokens": 2}, messages=chat, stream=True, return_num_input_tokens=True
    )
    tokens = answer[-1].value("num_input_tokens")[0]
    assert joined(answer) == scripted_text(tokens, 2)
    assert joined(backend.ask({"max_tokens": 2}, input_ids=[104, 105], stream=True)) == (
        scripted_text(2, 2)
    )


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "text_input"),
    ({}, {"text_input": ""}, "text_input"),
    ({}, {"text_input": b"\xff\xfe"}, "text_input"),
    ({}, {"text_input": "a", "messages": "[]"}, "messages"),
    ({}, {"text_input": np.array([b"a", b"b"], dtype=np.object_)}, "text_input"),
    ({}, {"text_input": np.array([1.5])}, "text_input"),
    ({}, {"messages": "[" * 1000}, "messages"),
    ({}, {"messages": '[{"role":"user","content":5}]'}, "messages[0].content"),
    ({}, {"input_ids": []}, "input_ids"),
    ({}, {"input_ids": [-1]}, "input_ids"),
    ({}, {"input_ids": [10**6]}, "input_ids"),
    ({}, {"input_ids": np.array([1.5])}, "input_ids"),
    ({}, {"text_input": "a" * 600}, "text_input"),
    ({}, {"text_input": "a", "stream": np.array([True, False])}, "stream"),
    ({}, {"text_input": "a", "sampling_parameters": '{"temperature": NaN}'}, "temperature"),
    ({}, {"text_input": "a", "sampling_parameters": "[]"}, "sampling_parameters"),
    ({"temperature": 9}, {"text_input": "a"}, "temperature"),
    ({"nobody": 1}, {"text_input": "a"}, "nobody"),
    ({}, {"control": "{}"}, "control.op"),
    ({}, {"control": b"\xff"}, "control"),
]


@pytest.mark.parametrize(("parameters", "inputs", "param"), BAD)
def test_bad_input_is_named_and_the_next_request_works(
    backend: Backend, parameters: dict[str, Any], inputs: dict[str, Any], param: str
) -> None:
    error = error_of(backend.ask(parameters, return_error=True, **inputs))
    assert error["param"] == param
    assert error["status"] == 400
    foreign = backend.ask(parameters, **inputs)
    assert [r.error().code() for r in foreign] == [pb_utils.TritonError.INVALID_ARG]
    assert foreign[0].error().message() == error["message"]
    assert joined(backend.ask({"max_tokens": 1}, text_input="a", stream=True))


def test_a_broken_request_harms_no_other_of_the_same_batch(backend: Backend) -> None:
    class Broken(pb_utils.InferenceRequest):
        def parameters(self) -> str:
            raise RuntimeError("no such segment")

    broken = Broken([make_tensor("text_input", "a"), make_tensor("return_error", True)])
    good = make_request({"max_tokens": 3}, text_input="abc", stream=True)
    backend.model.execute([broken, good])
    assert error_of(broken.sender.wait_closed(WAIT_S))["status"] == 500
    assert joined(good.sender.wait_closed(WAIT_S)) == scripted_text(3, 3)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("running", [True, False])
def test_a_cancelled_request_is_closed_and_freed(
    backend: Backend, stream: bool, running: bool
) -> None:
    if not running:
        backend.workers.running.clear()
    sender = backend.send({"max_tokens": 500}, text_input="abc", stream=stream)
    until(lambda: bool(backend.workers.last.sequences))
    sender.send_delay = 0.01  # so that it cannot finish first
    sender.cancel()
    responses = sender.wait_closed(WAIT_S)
    assert running or responses == []
    until(lambda: not backend.workers.last.sequences)


def test_a_slow_client_gets_its_tokens_joined(backend: Backend) -> None:
    sender = backend.send({"max_tokens": 300}, text_input="abc", stream=True)
    sender.send_delay = 0.02
    responses = sender.wait_closed(WAIT_S)
    assert joined(responses) == scripted_text(3, 300)
    assert len(responses) < 100


def test_a_send_that_fails_ends_its_request_alone(backend: Backend) -> None:
    backend.workers.running.clear()
    broken = backend.send({"max_tokens": 5}, text_input="abc", stream=True)
    broken.fail_sends = 2
    good = backend.send({"max_tokens": 5}, text_input="abcd", stream=True)
    backend.workers.running.set()
    assert broken.wait_closed(WAIT_S) == []
    assert joined(good.wait_closed(WAIT_S)) == scripted_text(4, 5)


def test_status_and_heartbeat(backend: Backend) -> None:
    (status,) = backend.ask(control='{"op":"status"}')
    payload = json.loads(status.value("control_output")[0])
    assert payload["state"] == "ready"
    assert (payload["model"], payload["version"]) == ("fake", "1")
    assert set(payload) == set(Heartbeat.__annotations__)  # what a client reads is what is told
    beats = backend.ask(control='{"op":"heartbeat","interval_ms":50,"count":3}')
    assert [json.loads(beat.value("control_output")[0])["state"] for beat in beats] == ["ready"] * 3


def test_64_streams_at_once_each_end_once(backend: Backend) -> None:
    requests = [
        make_request({"max_tokens": 20}, text_input="x" * (i + 1), stream=True) for i in range(64)
    ]
    backend.model.execute(requests)
    for i, request in enumerate(requests):
        assert joined(request.sender.wait_closed(WAIT_S)) == scripted_text(i + 1, 20)


def own_threads() -> set[threading.Thread]:
    """All but those of a pretended Triton, which other tests may have left to finish."""
    return {t for t in threading.enumerate() if not t.name.startswith(THREAD_NAME)}


def test_finalize_answers_everything_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "DRAIN_S", 0.05)
    before = own_threads()
    workers = ScriptedWorkers()
    model = start(tmp_path, monkeypatch, workers)
    workers.running.clear()
    open_one = make_request({"max_tokens": 5}, text_input="a", stream=True, return_error=True)
    beats = make_request(control='{"op":"heartbeat","interval_ms":5000,"count":9}')
    model.execute([open_one, beats])
    model.finalize()
    assert error_of(open_one.sender.responses)["status"] == 503
    assert open_one.sender.closed
    assert beats.sender.closed
    assert workers.last.closed
    assert own_threads() <= before


@pytest.mark.parametrize(
    ("settings", "config", "named"),
    [
        ("weights: fake\nblok_size: 3\n", {}, "blok_size"),
        ("weights: fake\ndtype: int3\n", {}, "dtype"),
        ("weights: [\n", {}, "model.yaml"),
        ("dtype: auto\n", {}, "weights"),
        (
            "weights: fake\n",
            {"instance_group": [{"count": 1, "kind": "KIND_GPU", "gpus": [0, 1]}]},
            "instance_group",
        ),
    ],
)
def test_a_bad_setting_stops_the_load_with_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    config: dict[str, Any],
    named: str,
) -> None:
    workers = ScriptedWorkers()
    with pytest.raises(pb_utils.TritonModelException, match=named):
        start(tmp_path, monkeypatch, workers, settings, config)
    assert workers.spawned == []


def test_a_worker_that_cannot_load_stops_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = ScriptedWorkers(WorkerScript(load_error="max_model_len must be at most 4096."))
    with pytest.raises(pb_utils.TritonModelException, match="at most 4096"):
        start(tmp_path, monkeypatch, workers)


def test_half_a_surrogate_pair_is_sent_as_a_replacement() -> None:
    tensor = codec._string_tensor("text_output", "a\ud800b")
    assert tensor.as_numpy()[0].decode() == "a?b"


def test_metrics_equal_what_clients_saw(backend: Backend) -> None:
    backend.ask({"max_tokens": 7}, text_input="abc", stream=True)
    backend.ask({"temperature": -1}, text_input="abc")
    until(lambda: sum(backend.model._service.counts().requests.values()) == 2)
    backend.model._metrics.close()
    assert value("shoal_generation_tokens_total") == 7
    assert value("shoal_prompt_tokens_total") == 3
    assert value("shoal_kv_blocks_total") == 1000
    by_reason = {
        m.labels["finish_reason"]: m.value()
        for m in pb_utils.MetricFamily.families["shoal_requests_total"].metrics
    }
    assert by_reason == {"length": 1, "error": 1}


def value(name: str) -> float:
    (metric,) = pb_utils.MetricFamily.families[name].metrics
    assert metric.labels == {"model": "fake", "version": "1"}
    return metric.value()


def test_a_server_without_metrics_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pb_utils.MetricFamily, "supported", False)
    workers = ScriptedWorkers()
    backend = Backend(start(tmp_path, monkeypatch, workers), workers)
    assert joined(backend.ask({"max_tokens": 2}, text_input="a", stream=True))
    backend.model.finalize()


def test_parity_is_a_metric_only_after_a_self_test() -> None:
    counts = metrics.ServiceCounts()
    publisher = metrics.MetricsPublisher(pb_utils, {}, lambda: counts, interval_s=3600)
    until(lambda: "shoal_requests_total" in publisher._families)
    publisher._publish()
    assert "shoal_parity_ok" not in publisher._families
    for ok in (False, True):
        counts = metrics.ServiceCounts(parity_ok=ok)
        publisher._publish()
        assert publisher._metrics["shoal_parity_ok"].value() == ok
    publisher.close()


def test_gauges_go_back_and_counters_never() -> None:
    counts = [
        metrics.ServiceCounts(engine_steps=5, kv_blocks_free=9),
        metrics.ServiceCounts(engine_steps=3, kv_blocks_free=4),
    ]
    publisher = metrics.MetricsPublisher(pb_utils, {}, lambda: counts[0], interval_s=3600)
    until(lambda: "shoal_requests_total" in publisher._families)
    publisher._publish()
    counts.pop(0)
    publisher.close()
    assert publisher._metrics["shoal_engine_steps_total"].value() == 5
    assert publisher._metrics["shoal_kv_blocks_free"].value() == 4


def choice_parameters(**parameters: Any) -> dict[str, Any]:
    return {"max_tokens": 3, "n": 2, **parameters}


RETURN_ALL = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_token_ids": True,
}


def test_choices_without_stream_come_in_one_response(backend: Backend) -> None:
    (response,) = backend.ask(choice_parameters(), text_input="hello", **RETURN_ALL)
    text = scripted_text(5, 3)
    assert response.value("index") == [0, 1]
    assert response.value("text_output") == ["hello" + text] * 2
    assert response.value("finish_reason") == ["length", "length"]
    assert response.value("num_output_tokens") == [3, 3]
    assert response.value("num_input_tokens") == [5]
    assert response.value("token_ids") == [ord(letter) for letter in text + text]


def test_streamed_choices_say_which_they_are(backend: Backend) -> None:
    responses = backend.ask(choice_parameters(), text_input="hello", stream=True, **RETURN_ALL)
    texts, reasons, token_ids = {0: "", 1: ""}, {}, {0: [], 1: []}
    for response in responses:
        ids = list(response.value("token_ids") or [])
        parts = zip(
            response.value("index"),
            response.value("text_output"),
            response.value("num_output_tokens"),
            response.value("finish_reason") or ["", ""],
            strict=False,
        )
        for index, text, num_tokens, reason in parts:
            texts[index] += text
            token_ids[index] += ids[:num_tokens]
            del ids[:num_tokens]
            if reason:
                reasons[index] = reason
        assert not ids
    text = scripted_text(5, 3)
    assert texts == {0: text, 1: text}
    assert token_ids == {index: [ord(letter) for letter in text] for index in (0, 1)}
    assert reasons == {0: "length", 1: "length"}


def test_a_request_for_one_choice_has_no_index(backend: Backend) -> None:
    (response,) = backend.ask({"max_tokens": 3, "n": 1}, text_input="hello")
    assert response.value("index") is None
