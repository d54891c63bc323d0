"""A worker in virtual time: the real scheduler and KV manager, with steps that only take time."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from shoal.load.step_cost import StepCost, StepShape
from shoal.load.virtual_time import EventLoop
from shoal.scheduler.dispatched import Abort, Add, Command, DispatchedSequence
from shoal.scheduler.outputs import SampledToken, SchedulerOutput, StepOutput
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.step_pace import StepPace

IDLE_S = 0.050  # the longest silence of an idle worker

# What a hand-over tells the worker: every field that both sides know by the same name.
_HANDED_OVER = tuple(
    {field.name for field in fields(Sequence) if field.init}
    & {field.name for field in fields(DispatchedSequence)} - {"token_ids"}
)

# The token at an output index of a sequence, by seq_id.
TokenSource = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One message to the dispatcher: the outputs of a step, if any, and the status after it."""

    worker_id: int
    outputs: list[StepOutput]
    free_blocks: int
    num_running: int
    num_waiting: int
    step: int


@dataclass(slots=True)
class _Message:
    """What arrived: an abort, or a sequence as it was when it was handed over."""

    command: Command
    sequence: Sequence | None


class SimulatedWorker:
    """The loop of ``shoal.backend.worker`` with a virtual clock.

    While there is work it steps without pause and reads its messages between steps; without, it
    waits for one and gives a sign of life every 50 ms.
    """

    def __init__(
        self,
        worker_id: int,
        scheduler: Scheduler,
        cost: StepCost,
        loop: EventLoop,
        send: Callable[[WorkerReport], None],
        token_source: TokenSource,
    ) -> None:
        self.worker_id = worker_id
        self.scheduler = scheduler
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_scheduled = 0  # sum over steps of sequences in the batch
        self._cost = cost
        self._loop = loop
        self._send = send
        self._token_source = token_source
        self._inbox: list[_Message] = []
        self._is_stepping = False
        scheduler.pace = StepPace.measured(
            lambda decodes, tokens, computed: cost.seconds(
                StepShape(
                    tokens,
                    decodes,
                    computed + tokens + decodes,
                    tokens * computed + tokens * (tokens + 1) // 2,
                )
            )
        )
        self._wait = 0  # number of the present wait: a timer of an earlier one is void

    def start(self) -> None:
        """Begin to wait for messages."""
        self._turn()

    def message_of(self, command: Command) -> _Message:
        """What goes over the link, made at once: a dispatched sequence's tokens still grow."""
        if isinstance(command, Abort):
            return _Message(command, None)
        dispatched = command.sequence
        values = {name: getattr(dispatched, name) for name in _HANDED_OVER}
        return _Message(command, Sequence(token_ids=list(dispatched.token_ids), **values))

    def receive(self, message: _Message) -> None:
        """Take a message that arrives now."""
        self._inbox.append(message)
        if not self._is_stepping:
            self._turn()

    def _turn(self) -> None:
        self._apply_messages()
        self._wait += 1
        if not self.scheduler.has_unfinished:
            self._report([])
            self._await_message()
            return
        output = self.scheduler.schedule()
        if not output.scheduled:
            self._report([])
            self._await_message()
            return
        seconds = self._cost.seconds(StepShape.of(output.scheduled))
        self.busy_s += seconds
        self.num_steps += 1
        self.num_scheduled += len(output.scheduled)
        self._is_stepping = True
        self.scheduler.note_duration(output, seconds)
        self._loop.after(seconds, self._end_step, output)

    def _end_step(self, output: SchedulerOutput) -> None:
        source = self._token_source
        sampled = {}
        for item in output.scheduled:
            if item.samples:
                seq_id, index = item.sequence.seq_id, item.sequence.num_output_tokens
                sampled[seq_id] = SampledToken(source(seq_id, index))
        outputs = self.scheduler.update_from_output(output, sampled)
        self._is_stepping = False
        self._report(outputs)
        self._turn()

    def _await_message(self) -> None:
        self._loop.after(IDLE_S, self._time_out, self._wait)

    def _time_out(self, wait: int) -> None:
        if wait == self._wait and not self._is_stepping:
            self._turn()

    def _apply_messages(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            match message.command:
                case Add():
                    assert message.sequence is not None
                    self.scheduler.add(message.sequence)
                case Abort(seq_id=seq_id):
                    self.scheduler.abort(seq_id)

    def _report(self, outputs: list[StepOutput]) -> None:
        scheduler = self.scheduler
        self._send(
            WorkerReport(
                self.worker_id,
                outputs,
                scheduler.free_blocks,
                scheduler.num_running,
                scheduler.num_waiting,
                self.num_steps,
            )
        )
