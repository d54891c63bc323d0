"""The service over a fake worker: whole requests, cancels, crashes, hangs, start-up, shutdown."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_worker import ScriptedWorker, ScriptedWorkers, WorkerScript, scripted_text
from service_runs import (
    PROMPT,
    WAIT_S,
    Collector,
    aborted,
    ask,
    make_service,
    request,
    serving,
    until,
)

from shoal.backend import dispatch_loop, service, worker_keeper
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.intake import RawRequest
from shoal.backend.messages import AddSequence
from shoal.scheduler.sequence import FinishReason


def test_a_whole_answer() -> None:
    with serving(ScriptedWorkers()) as running:
        sink = ask(running, max_tokens=7)
        answer = sink.wait()
        assert answer.text == scripted_text(5, 7)
        assert answer.num_input_tokens == 5
        assert answer.num_new_tokens == 7
        assert answer.finish_reason is FinishReason.LENGTH
        assert bytes(answer.token_ids).decode() == answer.text


def test_the_prompt_is_echoed_once_when_asked_for() -> None:
    with serving(ScriptedWorkers()) as running:
        sink = Collector()
        running.submit(RawRequest(text_input=PROMPT, parameters={"max_tokens": 3}), sink)
        assert sink.wait().text == PROMPT + scripted_text(5, 3)
        assert sink.wait().num_new_tokens == 3


def test_a_stop_string_ends_the_sequence_in_the_worker_too() -> None:
    workers = ScriptedWorkers()
    with serving(workers) as running:
        text = scripted_text(5, 20)
        answer = ask(running, max_tokens=400, stop=text[3:6]).wait()
        assert answer.text == text[:3]
        assert answer.finish_reason is FinishReason.STOP
        until(lambda: not workers.last.sequences)
        until(lambda: running.status()["free_blocks"] == 1000)


def test_logprobs_come_with_the_tokens_they_belong_to() -> None:
    with serving(ScriptedWorkers()) as running:
        answer = ask(running, max_tokens=3, logprobs=2).wait()
        assert [entry.sampled.token_id for entry in answer.logprobs] == list(answer.token_ids)
        assert [entry.sampled.text for entry in answer.logprobs] == list(scripted_text(5, 3))
        assert [[item.rank for item in entry.top] for entry in answer.logprobs] == [[1, 2]] * 3
        assert answer.cumulative_logprob == pytest.approx(-1.5)


def test_a_cumulative_logprob_alone_makes_the_sampler_report() -> None:
    with serving(ScriptedWorkers()) as running:
        answer = ask(running, max_tokens=4, return_cumulative_logprob=True).wait()
        assert answer.cumulative_logprob == pytest.approx(-2.0)
        assert ask(running, max_tokens=4).wait().cumulative_logprob is None


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"no_such": 1}, "no_such"),
        ({"sampling_parameters": "{"}, "sampling_parameters"),
        ({"messages": "[]"}, "messages"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_works(
    values: dict[str, Any], param: str
) -> None:
    with serving(ScriptedWorkers()) as running:
        refusal = ask(running, **values).wait()
        assert refusal.error is not None
        assert (refusal.error.status, refusal.error.param) == (400, param)
        assert refusal.finish_reason is FinishReason.ERROR
        assert ask(running, max_tokens=1).wait().error is None


def test_a_fault_of_ours_in_intake_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedWorkers()) as running:
        monkeypatch.setattr(service.Intake, "prepare", lambda self, raw, salt: 1 // 0)
        error = ask(running).wait().error
        assert error is not None
        assert error.status == 500
        assert "ZeroDivision" not in error.message


def test_cancel_while_it_runs_frees_the_worker() -> None:
    workers = ScriptedWorkers()
    with serving(workers) as running:
        sink = Collector()
        seq_id = running.submit(request(max_tokens=500), sink)
        assert sink.started.wait(WAIT_S)
        workers.running.clear()
        running.cancel(seq_id)
        assert sink.wait().finish_reason is FinishReason.CANCELLED
        until(lambda: aborted(workers.last) == [seq_id])
        until(lambda: running.status()["free_blocks"] == 1000)
        running.cancel(seq_id)  # unknown by now
        running.cancel(10**9)


def test_cancel_in_the_queue_never_reaches_the_worker() -> None:
    workers = ScriptedWorkers(WorkerScript(max_num_seqs=1))
    with serving(workers) as running:
        workers.running.clear()
        first = ask(running, max_tokens=5)
        until(lambda: len(workers.last.sequences) == 1)
        sink = Collector()
        seq_id = running.submit(request(max_tokens=5), sink)
        until(lambda: running.status()["num_queued"] == 1)
        running.cancel(seq_id)
        assert sink.wait().finish_reason is FinishReason.CANCELLED
        workers.running.set()
        assert first.wait().finish_reason is FinishReason.LENGTH
        assert len([m for m in workers.last.received if isinstance(m, AddSequence)]) == 1


def test_cancel_while_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = ScriptedWorkers()
    with serving(workers) as running:
        entered, go_on = threading.Event(), threading.Event()
        prepare = service.Intake.prepare

        def slow(self: Any, raw: RawRequest, salt: bytes) -> Any:
            entered.set()
            assert go_on.wait(WAIT_S)
            return prepare(self, raw, salt)

        monkeypatch.setattr(service.Intake, "prepare", slow)
        sink = Collector()
        seq_id = running.submit(request(max_tokens=5), sink)
        assert entered.wait(WAIT_S)
        running.cancel(seq_id)
        assert sink.wait().finish_reason is FinishReason.CANCELLED
        go_on.set()
        assert ask(running, max_tokens=2).wait().num_new_tokens == 2
        assert not sink.late
        assert len([m for m in workers.last.received if isinstance(m, AddSequence)]) == 1


def test_a_full_queue_says_when_to_retry() -> None:
    workers = ScriptedWorkers(WorkerScript(max_num_seqs=1))
    with serving(workers, max_queued_requests=2) as running:
        workers.running.clear()
        first = ask(running, max_tokens=2)
        until(lambda: len(workers.last.sequences) == 1)
        others = [ask(running, max_tokens=2) for _ in range(2)]
        until(lambda: running.status()["num_queued"] == 2)
        error = ask(running, max_tokens=2).wait().error
        assert error is not None
        assert (error.status, error.code) == (429, "queue_full")
        assert error.retry_after_ms
        workers.running.set()
        assert {sink.wait().finish_reason for sink in [first, *others]} == {FinishReason.LENGTH}


def test_a_flood_beyond_the_intake_pool_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedWorkers(), max_queued_requests=3) as running:
        go_on = threading.Event()
        prepare = service.Intake.prepare

        def slow(self: Any, raw: RawRequest, salt: bytes) -> Any:
            assert go_on.wait(WAIT_S)
            return prepare(self, raw, salt)

        monkeypatch.setattr(service.Intake, "prepare", slow)
        sinks = [ask(running, max_tokens=1) for _ in range(5)]
        for sink in sinks[3:]:
            error = sink.wait().error
            assert error is not None
            assert error.status == 429
        go_on.set()
        assert all(sink.wait().error is None for sink in sinks[:3])


def test_a_dead_worker_changes_no_text() -> None:
    dying = WorkerScript(die_on=lambda worker: worker.num_steps == 4)
    workers = ScriptedWorkers(dying, WorkerScript())
    with serving(workers) as running:
        sinks = [ask(running, "x" * n, max_tokens=20) for n in (3, 4, 5)]
        for n, sink in zip((3, 4, 5), sinks, strict=True):
            answer = sink.wait()
            assert answer.text == scripted_text(n, 20)
            assert answer.num_new_tokens == 20
            assert answer.finish_reason is FinishReason.LENGTH
        assert running.status()["worker_restarts"] == 1
        assert running.status()["step"] >= 20, "steps of the dead worker count too"


def test_a_sequence_that_kills_workers_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_keeper, "FIRST_BACKOFF_S", 0.0)

    def poisoned(worker: ScriptedWorker) -> bool:
        return any(len(m.token_ids) == 66 for m in worker.sequences.values())

    workers = ScriptedWorkers(WorkerScript(die_on=poisoned))
    with serving(workers) as running:
        good = [ask(running, "x" * n, max_tokens=30) for n in (3, 4, 5)]
        bad = ask(running, "p" * 66, max_tokens=30)
        error = bad.wait().error
        assert error is not None
        assert (error.status, error.code) == (500, "worker_died")
        assert [sink.wait().text for sink in good] == [scripted_text(n, 30) for n in (3, 4, 5)]


def test_a_sequence_that_fails_in_the_worker_fails_alone() -> None:
    workers = ScriptedWorkers(WorkerScript(fail_on=lambda message: message.num_prompt_tokens == 3))
    with serving(workers) as running:
        good, bad = ask(running, "xxxx", max_tokens=9), ask(running, "xxx", max_tokens=9)
        error = bad.wait().error
        assert error is not None
        assert error.status == 500
        assert good.wait().text == scripted_text(4, 9)


def test_a_grammar_that_breaks_on_its_way_is_the_clients_fault() -> None:
    script = WorkerScript(fail_on=lambda message: True, fault="guided_regex")
    with serving(ScriptedWorkers(script)) as running:
        error = ask(running).wait().error
        assert error is not None
        assert (error.status, error.code) == (400, "unsupported_grammar")
        assert (error.param, error.message) == ("guided_regex", "It failed.")


def test_output_that_cannot_be_processed_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push = dispatch_loop.OutputProcessor.push_plain

    def broken(self: Any, *arguments: Any) -> Any:
        if self.num_output_tokens >= 2 and self._min_tokens == 1:
            raise RuntimeError
        return push(self, *arguments)

    monkeypatch.setattr(dispatch_loop.OutputProcessor, "push_plain", broken)
    workers = ScriptedWorkers()
    with serving(workers) as running:
        bad, good = ask(running, max_tokens=400, min_tokens=1), ask(running, max_tokens=9)
        error = bad.wait().error
        assert error is not None
        assert error.status == 500
        assert good.wait().text == scripted_text(5, 9)
        until(lambda: not workers.last.sequences)


def test_only_the_first_worker_tests_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = spawned_configs(monkeypatch)
    served = service.Service(EngineConfig("fake", self_test=3), "fake", "1")
    served._spawn()
    served._loop = loop_with(ready=None)
    served._spawn()
    served._loop = loop_with(ready="a worker was ready")
    served._spawn()
    assert [config.self_test for config in asked] == [3, 3, 0]


def test_a_disk_folder_that_went_bad_keeps_no_worker_from_coming_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = spawned_configs(monkeypatch)
    served = service.Service(EngineConfig("fake", kv_disk_dir="kv"), "fake", "1")
    for refused, ready in ((True, None), (False, "a worker was ready"), (True, "one was ready")):
        served._loop = loop_with(ready, refused)
        served._spawn()
    assert [config.kv_disk_dir for config in asked] == ["kv", "kv", None]


def spawned_configs(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    asked: list[EngineConfig] = []
    monkeypatch.setattr(service, "WorkerProcess", lambda config: asked.append(config))
    return asked


def loop_with(ready: object, was_refused: bool = False) -> Any:
    return SimpleNamespace(ready=ready, was_refused=was_refused)


def test_a_hung_worker_is_killed_and_replaced() -> None:
    workers = ScriptedWorkers(WorkerScript(silent=True), WorkerScript())
    with serving(workers, worker_stall_timeout_s=1) as running:
        assert ask(running, max_tokens=6).wait().text == scripted_text(5, 6)
        assert workers.spawned[0].killed
        assert running.status()["worker_restarts"] == 1


def test_a_silent_worker_is_not_ready_long_before_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "STUCK_AFTER_S", 0.1)
    workers = ScriptedWorkers(WorkerScript(silent=True))
    with serving(workers) as running:
        until(lambda: running.status()["state"] == "stuck")


def test_a_worker_that_refuses_to_load_stops_the_start() -> None:
    phases: list[str] = []
    running = make_service(ScriptedWorkers(WorkerScript(load_error="max_model_len: 9")))
    with pytest.raises(ConfigError, match="max_model_len: 9"):
        running.start(lambda phase, done, total: phases.append(phase))
    running.stop(0)
    assert phases == ["weights"]


def test_a_worker_that_closes_its_socket_and_stays_is_waited_for_and_replaced() -> None:
    workers = ScriptedWorkers(WorkerScript(silent=True), WorkerScript())
    with serving(workers) as running:
        leaving = workers.last
        client = ask(running, max_tokens=4)
        leaving.is_over = True  # and its socket stays readable
        before = leaving.num_receives
        assert client.wait().text == scripted_text(5, 4)
        assert leaving.killed
        # A look each 50 ms for a second; thousands where the socket's end woke the loop.
        assert leaving.num_receives - before < 100


def test_a_worker_that_dies_loading_stops_the_start() -> None:
    workers = ScriptedWorkers(WorkerScript(dies_loading=True))
    running = make_service(workers)
    with pytest.raises(ConfigError, match="ended while loading"):
        running.start()
    running.stop(0)
    assert len(workers.spawned) == 1


def test_no_worker_at_all_is_said_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_keeper, "FIRST_BACKOFF_S", 0.0)
    dying = WorkerScript(die_on=lambda worker: True)
    workers = ScriptedWorkers(dying, WorkerScript(dies_loading=True))
    with serving(workers) as running:
        error = ask(running).wait().error
        assert error is not None
        assert (error.status, error.code) == (503, "worker_unavailable")
        assert running.status()["state"] == "restarting"
        assert running.status()["num_live"] == 0
        later = ask(running).wait().error
        assert later is not None
        assert later.status == 503


def test_stop_lets_open_requests_finish() -> None:
    workers = ScriptedWorkers()
    running = make_service(workers)
    running.start()
    workers.running.clear()
    sink = ask(running, max_tokens=8)
    until(lambda: len(workers.last.sequences) == 1)
    stopper = threading.Thread(target=running.stop, args=(WAIT_S,))
    stopper.start()
    until(lambda: running.status()["state"] == "draining")
    refused = ask(running).wait().error
    assert refused is not None
    assert refused.status == 503
    workers.running.set()
    stopper.join(WAIT_S)
    assert sink.wait().text == scripted_text(5, 8)
    assert workers.last.closed


def test_stop_fails_what_does_not_finish_in_time() -> None:
    workers = ScriptedWorkers()
    running = make_service(workers)
    running.start()
    workers.running.clear()
    sink = ask(running, max_tokens=8)
    until(lambda: len(workers.last.sequences) == 1)
    running.stop(0.05)
    error = sink.wait().error
    assert error is not None
    assert error.status == 503
    after = ask(running).wait().error
    assert after is not None
    assert after.status == 503
    running.stop(0)


def test_status_and_counts_say_what_clients_saw() -> None:
    with serving(ScriptedWorkers()) as running:
        answers = [ask(running, max_tokens=n).wait() for n in (2, 3, 4)]
        ask(running, temperature=-1).wait()
        until(lambda: running.status()["num_running"] == 0)
        status = running.status()
        assert status["state"] == "ready"
        assert (status["model"], status["version"]) == ("fake", "1")
        assert status["num_live"] == status["num_queued"] == status["num_waiting"] == 0
        assert status["free_blocks"] == status["total_blocks"] == 1000
        assert status["max_model_len"] == 512
        until(lambda: running.counts().requests == {"length": 3, "error": 1})
        counts = running.counts()
        assert counts.generation_tokens == sum(a.num_new_tokens for a in answers) == 9
        assert counts.prompt_tokens == 15


def test_every_request_gets_exactly_one_final_chunk() -> None:
    """Random lengths, cancels at random times, stop strings, bad input and two dead workers."""
    rng = random.Random(5)
    plans = [WorkerScript(die_on=lambda worker: worker.num_steps == 15)] * 2
    workers = ScriptedWorkers(*plans, WorkerScript(max_num_seqs=4))
    with serving(workers) as running:
        sinks: list[Collector] = []
        for _ in range(150):
            sink = Collector()
            values: dict[str, Any] = {"max_tokens": rng.randint(1, 40)}
            if rng.random() < 0.2:
                values["stop"] = chr(rng.randint(97, 122))
            if rng.random() < 0.1:
                values["top_p"] = 7
            seq_id = running.submit(request("x" * rng.randint(1, 50), **values), sink)
            sinks.append(sink)
            if rng.random() < 0.3:
                threading.Timer(rng.random() * 0.3, running.cancel, [seq_id]).start()
            time.sleep(rng.random() * 0.004)
        for sink in sinks:
            sink.wait()
        until(lambda: running.status()["free_blocks"] == running.status()["total_blocks"])
        assert running.status()["num_live"] == 0
        assert sum(running.counts().requests.values()) == 150
        assert not [sink for sink in sinks if sink.late]
