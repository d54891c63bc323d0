"""How long a lone tenant's prompts still yield after another one has gone."""

from builders import make_sampling

from shoal.scheduler.dispatched import Add
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.tenant_overlap import LONGEST_ABSENCE_S, TenantOverlap
from shoal.scheduler.worker_ledger import WorkerCapacity


def after_absences(*absences_s: float) -> tuple[TenantOverlap, float]:
    """One whose last arrival was just now, and the time."""
    overlap, now = TenantOverlap(), 100.0
    overlap.note_arrival(now, ends_absence=True)
    for absence_s in absences_s:
        now += absence_s
        overlap.note_arrival(now, ends_absence=True)
    return overlap, now


def test_before_any_two_were_there_at_once_it_is_unlikely() -> None:
    assert not TenantOverlap().is_likely(0.0)


def test_strangers_are_waited_for_the_longest() -> None:
    for absences in ([], [1.0] * 7, [1.0] * 20 + [LONGEST_ABSENCE_S]):
        overlap, now = after_absences(*absences)
        assert overlap.is_likely(now + LONGEST_ABSENCE_S - 0.1)
        assert not overlap.is_likely(now + LONGEST_ABSENCE_S)


def test_the_wait_follows_the_longest_of_the_last_absences() -> None:
    overlap, now = after_absences(*[1.0] * 10, 2.0, *[0.5] * 10)
    assert overlap.is_likely(now + 5.9)
    assert not overlap.is_likely(now + 6.1)
    overlap, now = after_absences(2.0, *[0.5] * 40)
    assert not overlap.is_likely(now + 1.6)
    overlap, now = after_absences(*[20.0] * 10)
    assert not overlap.is_likely(now + LONGEST_ABSENCE_S)


def test_arrivals_among_those_that_are_there_end_no_absence() -> None:
    overlap, now = after_absences(*[1.0] * 10)
    for _ in range(100):
        now += 0.01
        overlap.note_arrival(now, ends_absence=False)
    assert overlap.is_likely(now + 2.9)
    assert not overlap.is_likely(now + 3.1)


class Tenants:
    """A dispatcher that two tenants use, each request with the urgency that it got."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(DispatcherConfig(100, policy="vtc"))
        self.dispatcher.worker_ready(1, WorkerCapacity(10_000, 16, 64, 16_000))
        self.num_asked = 0

    def ask(self, tenant: str, now: float) -> tuple[int, int]:
        """Its seq_id and its urgency."""
        self.num_asked += 1
        seq_id = self.num_asked
        self.dispatcher.add(seq_id, [7] * 16, make_sampling(max_tokens=8), now, tenant=tenant)
        (command,) = self.dispatcher.poll(now)
        assert isinstance(command, Add)
        return seq_id, command.sequence.urgency

    def visit(self, tenant: str, now: float) -> None:
        self.dispatcher.abort(self.ask(tenant, now)[0])


def test_who_is_alone_again_yields_no_longer_than_the_other_used_to_stay_away() -> None:
    tenants = Tenants()
    tenants.ask("heavy", 0.0)
    for second in range(10):
        tenants.visit("light", float(second))
    assert tenants.ask("heavy", 11.9)[1] == -1
    assert tenants.ask("heavy", 12.1)[1] == 0


def test_while_two_are_there_they_yield_however_long_nobody_came() -> None:
    tenants = Tenants()
    stays, _ = tenants.ask("light", 0.0)
    first, _ = tenants.ask("heavy", 1.0)
    tenants.dispatcher.add(9, [7] * 16, make_sampling(max_tokens=8), 1.0, tenant="heavy")
    (command,) = tenants.dispatcher.poll(1000.0)
    assert isinstance(command, Add)
    assert command.sequence.urgency != 0
    for seq_id in (stays, first):
        tenants.dispatcher.abort(seq_id)
    assert tenants.ask("heavy", 1001.0)[1] == 0
