import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine_config import EngineConfig
from shoal.backend.frames import FrameSocket
from shoal.backend.held_outputs import MIN_OUTPUTS
from shoal.backend.messages import (
    AbortSequence,
    AddSequence,
    LoadFailed,
    LoadProgress,
    Shutdown,
    StepResults,
    WorkerReady,
    WorkerStatus,
)
from shoal.backend.worker import FIRST_TOKENS_MS, IDLE_MS, LoadReporter, ParentLink, Worker
from shoal.backend.worker_process import WorkerProcess
from shoal.scheduler.outputs import SampledToken, StepOutput
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason

TESTS = Path(__file__).parents[1]
PATIENCE_S = 60
FAKE = {"module": "fake_worker", "env": {"PYTHONPATH": str(TESTS)}}


def add(seq_id, max_tokens, prompt=(5, 6, 7), **sampling):
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, **sampling)
    return AddSequence(seq_id, list(prompt), len(prompt), params)


def receive_until(worker, wanted):
    """All messages up to the first for which ``wanted`` holds, that one included."""
    seen = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for message in worker.receive(timeout_ms=1000):
            seen.append(message)
            if wanted(message):
                return seen
        assert worker.is_alive() or seen, worker.describe_exit()
    raise AssertionError(f"not received; the last was {seen[-1:]}")


def is_a(kind):
    return lambda message: isinstance(message, kind)


def outputs_of(messages):
    results = [message for message in messages if isinstance(message, StepResults)]
    return [output for result in results for output in result.outputs]


def run(worker, *messages):
    """Send sequences and receive until all have finished; outputs by seq_id."""
    waiting = {message.seq_id for message in messages}
    for message in messages:
        assert worker.send(message)

    def all_done(message):
        waiting.difference_update(o.seq_id for o in outputs_of([message]) if o.finish_reason)
        return not waiting

    outputs = {}
    for output in outputs_of(receive_until(worker, all_done)):
        outputs.setdefault(output.seq_id, []).append(output)
    return outputs


def wait_until_gone(pid):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.02)
    raise AssertionError("the worker outlived its parent")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def config_for(checkpoint, **settings):
    defaults = {"weights": str(checkpoint), "device": "cpu", "num_threads": 1, "kv_cache_mib": 4}
    return EngineConfig(**{**defaults, **settings})


@pytest.fixture(scope="module")
def real_worker(checkpoint):
    config = config_for(checkpoint, dtype="float32")
    worker = WorkerProcess(config)
    worker.start()
    worker.start_messages = receive_until(worker, is_a(WorkerReady))
    yield worker
    worker.close()
    assert worker.exit_code == 0


def test_a_real_worker_reports_its_loading_and_its_limits(real_worker):
    *progress, ready = real_worker.start_messages
    assert {"starting", "weights"} <= {message.phase for message in progress}
    weights = [message for message in progress if message.phase == "weights"]
    assert weights[-1].done == weights[-1].total > 0
    assert ready.vocab_size == 128
    assert ready.eos_token_ids == [2]
    assert ready.max_model_len == 256  # the model's own
    assert ready.num_blocks == 4 * 2**20 // (2 * 2 * 16 * 2 * 8 * 4)


def test_a_real_worker_gives_the_same_text_alone_and_together(real_worker):
    prompts = [(5, 6, 7), tuple(range(3, 60)), (9,), (100, 90, 80, 70)]
    messages = [add(10 + i, 12, prompt=prompt) for i, prompt in enumerate(prompts)]
    together = run(real_worker, *messages)
    for message in messages:
        outputs = together[message.seq_id]
        assert len(outputs) == 12
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        again = run(real_worker, message)[message.seq_id]
        assert [item.token for item in again] == [item.token for item in outputs]


def test_replay_with_some_outputs_continues_the_same_text(real_worker):
    message = add(20, 16, temperature=1.0)
    tokens = [o.token.token_id for o in run(real_worker, message)[20]]
    half = AddSequence(20, [*message.token_ids, *tokens[:7]], 3, message.sampling)
    replayed = run(real_worker, half)[20]
    assert [o.token.token_id for o in replayed] == tokens[7:]
    assert [o.output_index for o in replayed] == list(range(7, 16))


def test_abort_mid_way_frees_the_blocks(real_worker):
    assert real_worker.send(add(30, 200))
    receive_until(real_worker, lambda message: bool(outputs_of([message])))
    real_worker.send(AbortSequence(30))
    (*_, idle) = receive_until(
        real_worker, lambda message: isinstance(message, WorkerStatus) and not message.num_running
    )
    assert idle.free_blocks == real_worker.start_messages[-1].num_blocks
    assert idle.num_waiting == 0


def test_a_sequence_that_cannot_run_is_answered_and_the_next_one_runs(real_worker):
    outputs = run(real_worker, add(40, 5, prompt=[5000]), add(41, 5))
    assert outputs[40][0].finish_reason is FinishReason.ERROR
    assert len(outputs[41]) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "no-such-model"}, "no-such-model"),
        ({"max_model_len": 10_000}, "at most 256"),
        ({"step_log": "/proc/no/steps.jsonl"}, "step_log"),
    ],
)
def test_a_worker_that_cannot_start_says_why(checkpoint, settings, message):
    worker = WorkerProcess(config_for(checkpoint, **settings))
    worker.start()
    *_, failed = receive_until(worker, is_a(LoadFailed))
    assert select.select([worker.exit_fd], [], [], PATIENCE_S)[0]
    worker.close()
    assert message in failed.message
    assert worker.exit_code == 1


@pytest.fixture
def fake_worker():
    worker = WorkerProcess(EngineConfig(weights="fake"), **FAKE)
    worker.start()
    receive_until(worker, is_a(WorkerReady))
    yield worker
    worker.close()


def test_an_idle_worker_shows_that_it_lives(fake_worker):
    statuses = [receive_until(fake_worker, is_a(WorkerStatus)) for _ in range(3)]
    assert len(statuses) == 3


def test_the_socket_has_no_name_and_ends_with_the_worker(fake_worker):
    fd = fake_worker.socket.fileno()
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    (line,) = [
        row.split()
        for row in Path("/proc/net/unix").read_text().splitlines()
        if row.split()[6] == str(os.stat(fd).st_ino)
    ]
    assert len(line) == 7  # the eighth would be its path
    fake_worker.close()
    assert fake_worker.exit_code == 0


def test_signals_meant_for_the_whole_group_do_not_end_it(fake_worker):
    os.kill(fake_worker.pid, signal.SIGINT)
    os.kill(fake_worker.pid, signal.SIGTERM)
    assert [o.token.token_id for o in run(fake_worker, add(1, 3))[1]] == [8, 9, 10]


def test_a_killed_worker_is_noticed(fake_worker):
    os.kill(fake_worker.pid, signal.SIGKILL)
    readable, _, _ = select.select([fake_worker.exit_fd], [], [], PATIENCE_S)
    assert readable == [fake_worker.exit_fd]
    fake_worker.kill()  # reaps
    assert not fake_worker.is_alive()
    assert "SIGKILL" in fake_worker.describe_exit()
    assert not fake_worker.send(AbortSequence(1))
    assert all(isinstance(message, WorkerStatus) for message in fake_worker.receive())


def test_what_a_worker_sent_before_it_died_is_received(fake_worker):
    fake_worker.send(add(1, 3))
    assert select.select([fake_worker.socket], [], [], PATIENCE_S)[0]
    fake_worker.kill()
    assert fake_worker.receive()


def test_a_worker_nobody_reads_goes_on_and_leaves_when_told():
    ours, theirs = socket.socketpair()
    link = ParentLink(theirs.detach())
    message = LoadProgress("x" * 1000)
    for _ in range(300):  # as much as the socket takes, and some more
        link.send(message)
    parent = FrameSocket(ours)
    assert parent.send(msgspec.msgpack.encode(Shutdown()))
    assert link.receive(timeout_ms=1000) == [Shutdown()]
    frames = []
    while len(frames) < 300:
        frames += parent.receive()
        link.receive(timeout_ms=0)
    assert {msgspec.msgpack.decode(frame, type=LoadProgress) for frame in frames} == {message}
    parent.close()
    assert link.receive(timeout_ms=1000) == [Shutdown()]
    link.close()


def test_a_hung_worker_is_ended_by_close(fake_worker):
    os.kill(fake_worker.pid, signal.SIGSTOP)
    fake_worker.close(timeout_s=0.1)
    assert fake_worker.exit_code == -signal.SIGKILL
    fake_worker.close()  # again: nothing to do


PARENT = """
import sys, time
from shoal.backend.engine_config import EngineConfig
from shoal.backend.frames import FrameSocket
from shoal.backend.messages import WorkerReady
from shoal.backend.worker_process import WorkerProcess

worker = WorkerProcess(
    EngineConfig(weights="fake"), "fake_worker", {"PYTHONPATH": sys.argv[1]}
)
worker.start()
while not any(isinstance(m, WorkerReady) for m in worker.receive(1000)):
    pass
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(TESTS)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        parent.wait()
        wait_until_gone(pid)


class FakeLink:
    """Hands out scripted message lists; leaves when they are used up."""

    def __init__(self, script):
        self.script = script
        self.waits = []
        self.sent = []

    def receive(self, timeout_ms):
        self.waits.append(timeout_ms)
        return self.script.pop(0) if self.script else [Shutdown()]

    def send(self, message):
        self.sent.append(message)


class StalledEngine:
    """Has work but cannot schedule any of it."""

    has_unfinished = True
    made_progress = False
    status = WorkerStatus(0, 0, 0, 1, 0)

    def step(self):
        return []


def test_a_worker_that_can_do_nothing_does_not_spin():
    link = FakeLink([[], [], []])
    Worker(StalledEngine(), link).run()
    assert link.waits == [IDLE_MS] * 4
    assert len(link.sent) == 3


class ScriptedEngine:
    """Has work as long as there are steps left; each gives its outputs."""

    made_progress = True

    def __init__(self, *steps, num_running=1, num_waiting=0):
        self.steps = list(steps)
        self.status = WorkerStatus(0, 0, num_running, num_waiting, 0)

    @property
    def has_unfinished(self):
        return bool(self.steps)

    def step(self):
        return self.steps.pop(0)


def token(seq_id, index):
    return StepOutput(seq_id, index, SampledToken(7))


def waits_after(*steps, leaves_no_core=True, **status):
    """How long the worker waited for messages after each step."""
    link = FakeLink([[] for _ in range(len(steps))])
    Worker(ScriptedEngine(*steps, **status), link, leaves_no_core).run()
    assert link.waits[0] == IDLE_MS
    return link.waits[1:]


def test_first_tokens_get_the_cores_to_themselves_where_nobody_waits_for_the_next_step():
    first, second = [token(1, 0)], [token(1, 1)]
    assert waits_after(first, second, second) == [FIRST_TOKENS_MS, 0, 0]
    assert waits_after(first, second, leaves_no_core=False) == [0, 0]


def test_no_prompt_is_held_up_for_a_first_token_that_was_the_last():
    only = [StepOutput(1, 0, SampledToken(7), FinishReason.LENGTH)]
    assert waits_after(only, num_running=1) == [0]
    assert waits_after(only, num_running=0) == [FIRST_TOKENS_MS]


def test_no_step_is_held_up_for_first_tokens_beside_others():
    assert waits_after([token(1, 0), token(2, 5)], num_running=2) == [0]
    assert waits_after([token(1, 0)], num_running=2) == [0]  # a prompt that is half computed
    assert waits_after([token(1, 0)], num_waiting=1) == [0]
    assert waits_after([], num_running=0) == [0]


def test_no_token_waits_for_a_step_with_a_new_prompt():
    many = [[token(seq_id, index) for seq_id in range(MIN_OUTPUTS)] for index in (1, 2)]
    engine = ScriptedEngine(*many, num_running=MIN_OUTPUTS)
    engine.add = lambda message: added.append((message.seq_id, outputs_of(link.sent)))
    added = []
    link = FakeLink([[], [add(98, 1), add(99, 1)]])
    Worker(engine, link).run()
    assert added == [(98, []), (99, many[0])]
    assert outputs_of(link.sent) == [*many[0], *many[1]]


def test_loading_progress_is_thinned_out_but_keeps_its_ends():
    link = FakeLink([])
    report = LoadReporter(link)
    for done in range(10_001):
        report("weights", done, 10_000)
    report("kv cache", 0, 0)
    assert link.sent[0] == LoadProgress("weights", 0, 10_000)
    assert link.sent[-2:] == [LoadProgress("weights", 10_000, 10_000), LoadProgress("kv cache")]
    assert 100 < len(link.sent) < 250
