"""Whose prompts are urgent and whose yield while several tenants are about."""

from builders import make_sampling
from dispatching import WORKER, give, token

from shoal.scheduler.dispatched import Add
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.worker_ledger import WorkerCapacity


def make_fair(max_num_batched_tokens: int | None = 128) -> Dispatcher:
    dispatcher = Dispatcher(DispatcherConfig(100, policy="vtc"))
    capacity = WorkerCapacity(1000, 16, 32, 16_000, max_num_batched_tokens)
    dispatcher.worker_ready(WORKER, capacity)
    return dispatcher


def ask(dispatcher: Dispatcher, seq_id: int, tenant: str, num_prompt: int = 64) -> None:
    sampling = make_sampling(max_tokens=8)
    dispatcher.add(seq_id, [7] * num_prompt, sampling, 0.0, tenant=tenant)


def hand_over(dispatcher: Dispatcher) -> dict[int, int]:
    """Urgency by seq_id of what is sent now."""
    commands = dispatcher.poll(0.0)
    dispatcher.check_integrity()
    return {c.sequence.seq_id: c.sequence.urgency for c in commands if isinstance(c, Add)}


def test_one_tenant_alone_has_none() -> None:
    dispatcher = make_fair()
    for seq_id in range(8):
        ask(dispatcher, seq_id, "a")
    assert hand_over(dispatcher) == dict.fromkeys(range(8), 0)


def test_a_light_tenant_is_urgent_and_the_others_yield_a_step_at_a_time() -> None:
    dispatcher = make_fair()
    for seq_id in range(8):
        ask(dispatcher, seq_id, "flood")
    ask(dispatcher, 8, "light", num_prompt=16)
    sent = hand_over(dispatcher)
    assert sent == {0: -1, 1: -1, 8: 1}  # 128 tokens of the flood fill a step
    give(dispatcher, token(0, 0))
    assert hand_over(dispatcher) == {2: -1}
    ask(dispatcher, 9, "light", num_prompt=16)
    assert hand_over(dispatcher) == {9: 1}


def test_where_the_step_is_not_known_nothing_is_kept_back() -> None:
    dispatcher = make_fair(None)
    for seq_id in range(8):
        ask(dispatcher, seq_id, "flood")
    ask(dispatcher, 8, "light")
    assert len(hand_over(dispatcher)) == 9


def test_an_abort_frees_its_part_of_the_step() -> None:
    dispatcher = make_fair()
    for seq_id in range(4):
        ask(dispatcher, seq_id, "flood")
    ask(dispatcher, 8, "light", num_prompt=16)
    hand_over(dispatcher)
    dispatcher.abort(1)
    assert hand_over(dispatcher) == {2: -1}
