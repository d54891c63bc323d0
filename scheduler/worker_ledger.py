"""One worker as the dispatcher sees it: what it holds, what was handed to it, what it reports."""

from dataclasses import dataclass, field

from shoal.scheduler.block_pool import num_blocks_for
from shoal.scheduler.dispatched import DispatchedSequence
from shoal.scheduler.session_eviction import budget_blocks

# Of a worker's slots and blocks, kept for tenants below their share; see Dispatcher.
_RESERVED_SLOTS = 1 / 8
_RESERVED_BLOCKS = 1 / 8


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What a worker holds when it is empty."""

    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int
    max_model_len: int  # tokens, prompt and output together
    max_num_batched_tokens: int | None = None  # of one step; None: not known

    def num_blocks_for_next(self, sequence: DispatchedSequence) -> int:
        """Blocks of a sequence's known tokens and one more, within its own KV budget."""
        num_blocks = num_blocks_for(len(sequence.token_ids) + 1, self.block_size)
        kv_budget = sequence.sampling.kv_budget
        if kv_budget is None:
            return num_blocks
        return min(num_blocks, budget_blocks(kv_budget, self.block_size))

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an empty worker could give one more token to ``num_tokens`` known ones."""
        return num_tokens < min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's last own report."""

    free_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    step: int = 0


@dataclass(slots=True, eq=False)
class WorkerLedger:
    """One live worker and the ledger of what was handed to it.

    The ledger counts a sequence from its hand-over, for all its known tokens and the next, so it
    needs no report to be right: prefills still growing into their blocks and preempted sequences
    are in it. A report only adds what the ledger cannot explain (aborts on their way, leaks).
    """

    worker_id: int
    capacity: WorkerCapacity
    load: WorkerLoad
    reserved: dict[int, int] = field(default_factory=dict)  # seq_id -> blocks
    num_reserved: int = 0  # sum of ``reserved``
    num_unexplained: int = 0  # blocks in use at the last report beyond ``num_reserved``
    unproven: set[int] = field(default_factory=set)  # gave no token since they were handed over
    is_isolating: bool = False  # the one unproven sequence is a suspect
    yielding: dict[int, int] = field(default_factory=dict)  # seq_id -> tokens of their prefill

    @property
    def headroom(self) -> int:
        """Blocks for further sequences; negative when running ones outgrew the pool."""
        return self.capacity.num_blocks - self.num_reserved - self.num_unexplained

    @property
    def num_reserve_slots(self) -> int:
        return int(self.capacity.max_num_seqs * _RESERVED_SLOTS)

    def accepts(self, sequence: DispatchedSequence, leaves_reserve: bool = False) -> bool:
        """Whether the sequence may be handed over now. An idle worker takes what ever fits."""
        if not self.capacity.can_ever_fit(sequence.num_tokens):
            return False
        if not self.reserved:
            return True
        if sequence.urgency < 0 and self.has_enough_yielding:
            return False
        slots = self.capacity.max_num_seqs
        blocks = self.headroom
        if leaves_reserve:
            slots -= self.num_reserve_slots
            blocks -= int(self.capacity.num_blocks * _RESERVED_BLOCKS)
        needed = self.capacity.num_blocks_for_next(sequence)
        return len(self.reserved) < slots and needed <= blocks

    @property
    def has_enough_yielding(self) -> bool:
        """Whether prefills that yield fill a step: others are better kept in the queue's order."""
        most = self.capacity.max_num_batched_tokens
        return most is not None and sum(self.yielding.values()) >= most

    def take(self, sequence: DispatchedSequence, is_suspect: bool) -> None:
        """Enter a sequence that is handed over."""
        self.reserved[sequence.seq_id] = 0
        self.resize(sequence)
        self.unproven.add(sequence.seq_id)
        if sequence.urgency < 0:
            self.yielding[sequence.seq_id] = sequence.num_tokens
        self.is_isolating = is_suspect

    def grow(self, sequence: DispatchedSequence) -> None:
        """Note that the sequence gave a token."""
        if self.capacity.num_blocks_for_next(sequence) != self.reserved[sequence.seq_id]:
            self.resize(sequence)
        if self.unproven or self.yielding:
            self.prove(sequence.seq_id)

    def release(self, seq_id: int) -> None:
        """Take the sequence out of the ledger."""
        self.num_reserved -= self.reserved.pop(seq_id)
        self.prove(seq_id)

    def resize(self, sequence: DispatchedSequence) -> None:
        """Reserve what the sequence needs now."""
        num_blocks = self.capacity.num_blocks_for_next(sequence)
        self.num_reserved += num_blocks - self.reserved[sequence.seq_id]
        self.reserved[sequence.seq_id] = num_blocks

    def prove(self, seq_id: int) -> None:
        """Clear a sequence of suspicion; with the last one, the isolation ends."""
        self.unproven.discard(seq_id)
        self.yielding.pop(seq_id, None)
        self.is_isolating = self.is_isolating and bool(self.unproven)

    def report(self, load: WorkerLoad) -> None:
        """Note a report and what it says beyond the ledger."""
        self.load = load
        num_used = self.capacity.num_blocks - load.free_blocks
        self.num_unexplained = max(0, num_used - self.num_reserved)
