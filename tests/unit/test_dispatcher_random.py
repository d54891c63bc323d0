"""Dispatcher and real schedulers as workers, over links with delay, with aborts and crashes."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from builders import fake_token, make_sampling, make_scheduler, run_step

from shoal.scheduler.dispatched import Abort, Add, Command, Delivery
from shoal.scheduler.dispatcher import Dispatcher
from shoal.scheduler.dispatcher_config import DispatcherConfig
from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.policies import POLICY_NAMES
from shoal.scheduler.preemption import PreemptionConfig
from shoal.scheduler.sequence import FinishReason, Sequence
from shoal.scheduler.tiers import Tier, TierTable
from shoal.scheduler.worker_ledger import WorkerCapacity

BLOCK_SIZE = 4
MAX_NUM_SEQS = 4
TIERS = TierTable([Tier("high", 8.0), Tier("standard", 2.0), Tier("low", 1.0)])


@dataclass(frozen=True)
class Message:
    """What a worker says after a step."""

    outputs: list[StepOutput]
    free_blocks: int
    num_running: int
    num_waiting: int


class SimulatedWorker:
    """A scheduler behind two queues. ``kills(sequence)`` says whose step ends the process."""

    def __init__(self, num_blocks: int, kills: Callable[[Sequence], bool]) -> None:
        self.inbox: deque[Command] = deque()
        self.outbox: deque[Message] = deque()
        self.scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=16,
        )
        self.capacity = WorkerCapacity(
            num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, self.scheduler.config.max_model_len
        )
        self.most_left_waiting = 0  # after any step
        self._kills = kills

    def receive(self) -> None:
        """Act on the oldest command."""
        command = self.inbox.popleft()
        if isinstance(command, Abort):
            self.scheduler.abort(command.seq_id)
            return
        sent = command.sequence
        sequence = Sequence(
            sent.seq_id, list(sent.token_ids), sent.num_prompt_tokens, sent.sampling
        )
        if sent.fork_of is None:
            self.scheduler.add(sequence)
        else:
            self.scheduler.fork(sent.fork_of, sequence)

    def step(self) -> bool:
        """Run a step; False when the process died in it, its outputs unsent."""
        step = run_step(self.scheduler)
        if any(self._kills(item.sequence) for item in step.output.scheduled):
            return False
        scheduler = self.scheduler
        self.most_left_waiting = max(self.most_left_waiting, scheduler.num_waiting)
        self.outbox.append(
            Message(
                step.results, scheduler.free_blocks, scheduler.num_running, scheduler.num_waiting
            )
        )
        return True


@dataclass
class Client:
    """What one client asked for and got."""

    num_prompt: int
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    is_aborted: bool = False


class Simulation:
    """One dispatcher, some workers; every choice comes from ``rng``."""

    def __init__(
        self,
        rng: random.Random,
        num_workers: int,
        num_blocks: int,
        max_replays: int,
        kills: Callable[[Sequence], bool] = lambda sequence: False,
        policy: str = "fcfs",
        max_queued_requests: int = 10_000,
    ) -> None:
        self.rng = rng
        self.num_workers = num_workers
        self.num_blocks = num_blocks
        self.kills = kills
        self.dispatcher = Dispatcher(
            DispatcherConfig(
                max_queued_requests,
                max_replays,
                policy=policy,
                tiers=TIERS,
                preemption=PreemptionConfig(max_preemptions=2, min_run_s=3.0),
            )
        )
        self.now = 0.0  # a second a turn
        self.workers: dict[int, SimulatedWorker] = {}
        self.clients: dict[int, Client] = {}
        self.num_asked = 0
        self.refusals: list[RequestError] = []
        self.has_timeouts = False
        self.has_forks = False  # they wait, on a worker, for what they share
        self.num_started = 0
        self.num_killed = 0

    def add(self, most_tokens: int = 12) -> None:
        longest = self.num_blocks * BLOCK_SIZE
        num_prompt = self.rng.randint(1, longest // self.rng.choice([2, 8]))
        client = Client(num_prompt, self.rng.randint(1, min(most_tokens, longest - num_prompt)))
        seq_id = self.num_asked
        self.num_asked += 1
        sampling = make_sampling(max_tokens=client.max_tokens)
        try:
            shed = self.dispatcher.add(
                seq_id,
                [7] * num_prompt,
                sampling,
                self.now,
                tenant=self.rng.choice(["red", "green", "blue"]),
                slo_class=self.rng.choice(TIERS.names),
                timeout_s=self.rng.choice([*[None] * 9, 40.0]) if self.has_timeouts else None,
                # All prompts begin alike.
                fork_of=self.rng.choice([None, seq_id - 1, seq_id - 3]) if self.has_forks else None,
            )
        except RequestError as error:
            self.refusals.append(error)
            return
        self.clients[seq_id] = client
        self.deliver(shed)

    def abort(self) -> None:
        seq_id = self.rng.choice(list(self.clients))
        if not self.clients[seq_id].ends:
            self.clients[seq_id].is_aborted = True
        self.send(self.dispatcher.abort(seq_id))

    def kill(self, worker_id: int) -> None:
        """A worker ends; a part of what it said may still be read."""
        worker = self.workers.pop(worker_id)
        for _ in range(self.rng.randint(0, len(worker.outbox))):
            self.read(worker_id, worker)
        self.deliver(self.dispatcher.worker_dead(worker_id, self.now))
        for message in worker.outbox:  # late: must change nothing
            assert self.dispatcher.outputs(worker_id, message.outputs, self.now) == []
        self.num_killed += 1

    def start_worker(self) -> None:
        worker = SimulatedWorker(self.num_blocks, self.kills)
        self.workers[self.num_started] = worker
        self.deliver(self.dispatcher.worker_ready(self.num_started, worker.capacity))
        self.num_started += 1

    def send(self, commands: list[Command]) -> None:
        for command in commands:
            worker = self.workers[command.worker_id]
            if isinstance(command, Add):  # as the wire does: a copy of the tokens at this time
                sent = command.sequence
                assert sent.token_ids[sent.num_prompt_tokens :] == self.clients[sent.seq_id].tokens
            worker.inbox.append(command)

    def read(self, worker_id: int, worker: SimulatedWorker) -> None:
        message = worker.outbox.popleft()
        self.deliver(self.dispatcher.outputs(worker_id, message.outputs, self.now))
        self.dispatcher.worker_status(
            worker_id, message.free_blocks, message.num_running, message.num_waiting, 0
        )

    def deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            client = self.clients[delivery.seq_id]
            assert not client.ends, "a delivery after the final one"
            assert not client.is_aborted, "a delivery after an abort"
            if delivery.token is not None:
                client.tokens.append(delivery.token.token_id)
            if delivery.finish_reason is not None:
                client.ends.append(delivery.finish_reason)

    def turn(self, likely: float = 0.6) -> None:
        """Some of what can happen next happens."""
        if len(self.workers) < self.num_workers and self.rng.random() < likely:
            self.start_worker()
        self.now += 1.0
        self.deliver(self.dispatcher.expire(self.now))
        self.send(self.dispatcher.poll(self.now))
        for worker_id, worker in list(self.workers.items()):
            while worker.inbox and self.rng.random() < likely:
                worker.receive()
            if self.rng.random() < likely and not worker.step():
                self.kill(worker_id)
                continue
            while worker.outbox and self.rng.random() < likely:
                self.read(worker_id, worker)
        self.dispatcher.check_integrity()

    def settle(self) -> None:
        """Run until every client has its end; bounded, so that a live-lock shows."""
        for _ in range(200 + 40 * len(self.clients)):
            if self.dispatcher.num_live == 0:
                break
            self.turn(likely=0.9)
        assert self.dispatcher.num_live == 0, "not all ended"
        for client in self.clients.values():
            assert client.is_aborted != bool(client.ends)
            assert len(client.ends) <= 1


def check_texts(clients: dict[int, Client]) -> None:
    """Assert that each has its very tokens, all of them where it finished."""
    for seq_id, client in clients.items():
        expected = [fake_token(seq_id, index).token_id for index in range(client.max_tokens)]
        if FinishReason.LENGTH in client.ends:
            assert client.tokens == expected
        else:
            assert client.tokens == expected[: len(client.tokens)]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_or_doubled(seed: int) -> None:
    rng = random.Random(seed)
    # Crashes here are nobody's fault, so replays must not run out.
    simulation = Simulation(rng, rng.choice([1, 1, 3]), rng.choice([4, 10, 40]), 10_000)
    simulation.has_forks = True
    for _ in range(1500):
        if rng.random() < 0.3:
            simulation.add()
        if simulation.clients and rng.random() < 0.05:
            simulation.abort()
        if simulation.workers and rng.random() < 0.03:
            simulation.kill(rng.choice(list(simulation.workers)))
        simulation.turn()
    simulation.settle()
    assert simulation.num_killed > 0
    ends = [client.ends for client in simulation.clients.values() if not client.is_aborted]
    assert all(end == [FinishReason.LENGTH] for end in ends)
    check_texts(simulation.clients)
    while any(worker.inbox for worker in simulation.workers.values()):
        simulation.turn()
    for worker in simulation.workers.values():
        assert not worker.scheduler.has_unfinished
        assert worker.scheduler.free_blocks == simulation.num_blocks


@pytest.mark.parametrize("seed", range(12))
def test_a_sequence_that_kills_workers_fails_alone(seed: int) -> None:
    rng = random.Random(1000 + seed)
    culprit, at_output = rng.randrange(30), rng.choice([0, 0, 1])

    def kills(sequence: Sequence) -> bool:
        return sequence.seq_id == culprit and sequence.num_output_tokens > at_output

    simulation = Simulation(rng, rng.choice([1, 2]), 40, 3, kills)
    for _ in range(30):
        simulation.add()
        if rng.random() < 0.5:
            simulation.turn()
    simulation.settle()
    guilty = simulation.clients.pop(culprit)
    if guilty.max_tokens > at_output:
        assert guilty.ends == [FinishReason.ERROR]
        assert 4 <= simulation.num_killed <= 8  # more when the token before was lost as well
    assert all(c.ends == [FinishReason.LENGTH] for c in simulation.clients.values())
    check_texts(simulation.clients)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_handed_over_runs_in_the_next_step(seed: int) -> None:
    """When outputs cannot outgrow the pool: the dispatcher's headroom is never too optimistic."""
    rng = random.Random(seed)
    simulation = Simulation(rng, 1, 20, 3)
    for _ in range(500):
        if rng.random() < 0.5:
            simulation.add(most_tokens=1)
        simulation.turn()
    simulation.settle()
    (worker,) = simulation.workers.values()
    assert worker.most_left_waiting == 0
    assert worker.scheduler.num_preemptions == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_under_any_policy(policy: str, seed: int) -> None:
    """With tiers, preemption, shedding, refusals and timeouts, over links with delay."""
    rng = random.Random(2000 + seed)
    simulation = Simulation(
        rng, rng.choice([1, 2]), rng.choice([10, 40]), 10_000, policy=policy, max_queued_requests=8
    )
    simulation.has_timeouts = True
    for _ in range(1500):
        if rng.random() < 0.6:
            simulation.add()
        if simulation.clients and rng.random() < 0.03:
            simulation.abort()
        if simulation.workers and rng.random() < 0.01:
            simulation.kill(rng.choice(list(simulation.workers)))
        simulation.turn()
    simulation.settle()
    dispatcher = simulation.dispatcher
    assert simulation.refusals
    assert all(error.status == 429 for error in simulation.refusals)
    assert all(error.retry_after_ms is not None for error in simulation.refusals)
    assert dispatcher.num_shed > 0
    assert dispatcher.num_timeouts > 0
    assert (dispatcher.num_preempted > 0) == (policy != "fcfs")
    ends = [client.ends for client in simulation.clients.values() if not client.is_aborted]
    assert sum(end == [FinishReason.ERROR] for end in ends) == (
        dispatcher.num_shed + dispatcher.num_timeouts
    )
    check_texts(simulation.clients)
    while any(worker.inbox for worker in simulation.workers.values()):
        simulation.turn()
    for worker in simulation.workers.values():
        assert not worker.scheduler.has_unfinished
        assert worker.scheduler.free_blocks == simulation.num_blocks
