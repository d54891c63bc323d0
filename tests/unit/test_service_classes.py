"""Tenants, tiers and timeouts through a whole service over a fake worker."""

import threading
import time
from typing import Any

import msgspec
import pytest
from scripted_worker import ScriptedWorkers, WorkerScript, scripted_text
from service_runs import Collector, aborted, ask, request, serving, until

from shoal.backend.engine_config import EngineConfig
from shoal.backend.messages import AddSequence
from shoal.backend.service import Service
from shoal.scheduler.errors import RequestError

TIERS = {"high": {"weight": 8}, "standard": {"weight": 2}, "low": {"weight": 1}}


def one_slot() -> ScriptedWorkers:
    return ScriptedWorkers(WorkerScript(max_num_seqs=1))


def error_of(sink: Collector) -> RequestError:
    error = sink.wait().error
    assert error is not None
    return error


def order_of(workers: ScriptedWorkers) -> list[int]:
    """Prompt lengths, in the order of hand-over."""
    received = workers.last.received
    return [m.num_prompt_tokens for m in received if isinstance(m, AddSequence)]


def ask_in_order(running: Service, *asks: tuple[str, dict[str, Any]]) -> list[Collector]:
    """Each reaches the queue before the next is asked."""
    sinks = []
    for text, values in asks:
        sinks.append(ask(running, text, max_tokens=3, **values))
        until(lambda sink=sinks[-1]: bool(sink.chunks))  # type: ignore[misc]
    return sinks


def test_the_policy_of_the_settings_orders_the_queue() -> None:
    workers = one_slot()
    with serving(workers, policy="priority", tiers=TIERS, max_preemptions=0) as running:
        workers.running.clear()
        sinks = ask_in_order(
            running,
            ("a", {}),
            ("aa", {"slo_class": "low"}),
            ("aaa", {}),
            ("aaaa", {"x-shoal-slo-class": "high"}),
        )
        workers.running.set()
        for length, sink in enumerate(sinks, start=1):
            assert sink.wait().text == scripted_text(length, 3)
        assert order_of(workers) == [1, 4, 3, 2]


def test_tenants_take_turns() -> None:
    workers = one_slot()
    with serving(workers, policy="vtc") as running:
        workers.running.clear()
        flood = [("a" * length, {"tenant": "flood"}) for length in range(1, 6)]
        sinks = ask_in_order(running, *flood, ("a" * 9, {"tenant": "light"}))
        workers.running.set()
        for sink in sinks:
            sink.wait()
        assert order_of(workers).index(9) <= 2


def test_an_unknown_class_is_refused_by_name() -> None:
    with serving(ScriptedWorkers(), tiers=TIERS) as running:
        error = error_of(ask(running, slo_class="gold"))
        assert (error.status, error.param) == (400, "slo_class")
        assert "high, standard, low" in error.message
        assert ask(running, slo_class="low", max_tokens=2).wait().error is None


def test_class_and_timeout_may_come_in_the_sampling_json() -> None:
    with serving(ScriptedWorkers(), tiers=TIERS) as running:
        good = '{"max_tokens": 2, "slo_class": "low", "timeout": 60000}'
        assert ask(running, sampling_parameters=good).wait().error is None
        bad = '{"max_tokens": 2, "slo_class": "gold"}'
        assert error_of(ask(running, sampling_parameters=bad)).param == "slo_class"
        tenant = '{"tenant": "another"}'
        assert error_of(ask(running, sampling_parameters=tenant)).code == "unknown_parameter"


def test_a_request_past_the_operators_cap_ends_as_at_its_timeout() -> None:
    workers = one_slot()
    with serving(workers, max_request_seconds=1) as running:
        workers.running.clear()
        error = error_of(ask(running, max_tokens=3))
        assert (error.status, error.code, error.param) == (408, "timeout", "timeout")
        until(lambda: len(aborted(workers.last)) == 1)
        workers.running.set()


def test_what_a_request_waited_before_it_came_counts_too() -> None:
    workers = one_slot()
    with serving(workers, max_request_seconds=60) as running:
        sinks = [Collector(), Collector()]
        for sink, waited_s in zip(sinks, (61.0, 1.0), strict=True):
            running.submit(request(max_tokens=3), sink, waited_s)
        assert error_of(sinks[0]).code == "timeout"
        assert sinks[1].wait().text == scripted_text(5, 3)
        assert len(order_of(workers)) == 1


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_timeout_ends_a_request_and_frees_its_place(is_queued: bool) -> None:
    workers = one_slot()
    with serving(workers) as running:
        workers.running.clear()
        first = ask(running, max_tokens=3) if is_queued else None
        if first is not None:
            until(lambda: len(workers.last.sequences) == 1)
        sink = ask(running, max_tokens=3, timeout=150 if is_queued else 1000)
        if first is None:  # on a busy machine its time could be up before a worker has it
            until(lambda: len(workers.last.sequences) == 1)
        error = error_of(sink)
        assert (error.status, error.code, error.param) == (408, "timeout", "timeout")
        if first is None:
            until(lambda: len(aborted(workers.last)) == 1)
        workers.running.set()
        assert ask(running, max_tokens=3).wait().error is None
        until(lambda: running.status()["free_blocks"] == 1000)


def test_a_higher_tier_sheds_and_a_lower_one_is_refused() -> None:
    workers = one_slot()
    settings = {"tiers": TIERS, "max_queued_requests": 2, "policy": "priority"}
    with serving(workers, **settings) as running:
        workers.running.clear()
        ask_in_order(running, ("a", {}))
        until(lambda: len(workers.last.sequences) == 1)
        low, *_ = ask_in_order(running, ("aa", {"slo_class": "low"}), ("aaa", {}))
        until(lambda: running.status()["num_queued"] == 2)
        ask_in_order(running, ("aaaa", {"slo_class": "high"}))
        assert error_of(low).code == "shed"
        until(lambda: running._running_loop().status.num_shed == 1)
        refusals = [error_of(ask(running, slo_class="low")) for _ in range(3)]
        assert {(error.status, error.code) for error in refusals} == {(429, "queue_full")}
        times = [error.retry_after_ms or 0 for error in refusals]
        assert times == sorted(times)
        assert times[0] > 0


def test_a_full_queue_refuses_before_the_prompt_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = one_slot()
    with serving(workers, max_queued_requests=1) as running:
        workers.running.clear()
        ask_in_order(running, ("a", {}))
        until(lambda: len(workers.last.sequences) == 1)
        ask_in_order(running, ("aa", {}))
        until(lambda: running.status()["num_queued"] == 1)
        assert running._intake is not None
        prepare = threading.Event()
        monkeypatch.setattr(running._intake, "prepare", lambda raw, salt: prepare.set())
        assert error_of(ask(running)).status == 429
        assert not prepare.is_set()


def test_a_high_tier_takes_the_place_of_a_low_one_and_no_text_is_lost() -> None:
    workers = one_slot()
    settings = {"tiers": TIERS, "policy": "priority", "min_run_s": 0.0}
    with serving(workers, **settings) as running:
        low = ask(running, slo_class="low", max_tokens=400)
        assert low.started.wait(10)
        workers.running.clear()
        high = ask(running, "abc", slo_class="high", max_tokens=5)
        until(lambda: len(aborted(workers.last)) >= 1)
        workers.running.set()
        assert high.wait().text == scripted_text(3, 5)
        answer = low.wait()
        assert answer.text == scripted_text(5, 400)
        assert answer.num_new_tokens == 400
        assert running._running_loop().status.num_made_way >= 1


def test_tenant_limits_hold() -> None:
    workers = ScriptedWorkers()
    with serving(workers, tenants={"*": {"max_requests": 1}}) as running:
        workers.running.clear()
        (first,) = ask_in_order(running, ("a", {"tenant": "blue"}))
        assert error_of(ask(running, tenant="blue")).code == "tenant_limit"
        (other,) = ask_in_order(running, ("a", {"tenant": "green"}))
        workers.running.set()
        assert first.wait().error is None
        assert other.wait().error is None
        until(lambda: running.status()["num_live"] == 0)
        assert ask(running, tenant="blue", max_tokens=2).wait().error is None


@pytest.mark.parametrize(
    ("limits", "fields", "is_for_good"),
    [
        ({"max_requests": 4}, {"num_prompts": 4}, False),
        ({"max_requests": 4}, {"num_prompts": 5}, True),
        ({"max_requests": 4}, {"num_prompts": 2, "n": 2}, False),
        ({"max_requests": 4}, {"num_prompts": 3, "n": 2}, True),
        ({"max_tokens": 50}, {"num_prompts": 4, "max_tokens": 10}, False),
        ({"max_tokens": 50}, {"num_prompts": 5, "max_tokens": 10}, True),
    ],
)
def test_prompts_that_come_together_and_never_fit_are_refused_for_good(
    limits: dict[str, int], fields: dict[str, Any], is_for_good: bool
) -> None:
    given = {"max_tokens": 2, **fields}
    with serving(ScriptedWorkers(), tenants={"blue": limits}) as running:
        error = ask(running, "a", tenant="blue", **given).wait().error
        if is_for_good:
            assert error is not None
            assert (error.status, error.code, error.retry_after_ms) == (400, "tenant_limit", None)
            assert error.param in ("text_input", "max_tokens")
        else:
            assert error is None
        for wrong in (0, -1, "2", True):
            error = ask(running, "a", num_prompts=wrong).wait().error
            assert error is not None
            assert (error.status, error.param) == (400, "num_prompts")


def test_a_deadline_past_the_drain_estimate_is_refused_at_once() -> None:
    workers = one_slot()
    with serving(workers) as running:
        sinks = [ask(running, max_tokens=400) for _ in range(150)]
        until(lambda: running._running_loop().status.drain.wait_s() > 0.2)
        began = time.monotonic()
        error = error_of(ask(running, timeout=1))
        assert time.monotonic() - began < 5.0
        assert error.code == "deadline_unmeetable"
        assert error.retry_after_ms is not None
        assert not any(sink.late for sink in sinks)


def test_the_settings_reach_a_worker_as_they_are() -> None:
    config = EngineConfig("w", policy="wfq", tiers=TIERS, tenants={"*": {"weight": 2.5}})
    sent = msgspec.json.encode(config)
    assert msgspec.json.decode(sent, type=EngineConfig) == config
