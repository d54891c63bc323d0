"""What the dispatcher knows of a live sequence, and what it says to workers and clients."""

from dataclasses import dataclass

from shoal.scheduler.errors import RequestError
from shoal.scheduler.images import PromptImage
from shoal.scheduler.outputs import SampledToken
from shoal.scheduler.policies import Ticket
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import FinishReason


@dataclass(slots=True, eq=False)
class DispatchedSequence:
    """A live sequence as the dispatcher knows it. Owned by the dispatcher, read by its caller.

    ``token_ids`` is the prompt, then every output that was delivered: what a replay starts from.
    A preempted sequence is queued, and its former worker may yet send what it had computed.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    ticket: Ticket
    timeout_s: float | None = None  # from arrival to the last token
    cache_salt: bytes = b""  # only sequences of equal salts share cached prefixes
    urgency: int = 0  # see Sequence; set when it is handed over
    tpot_s: float | None = None
    images: tuple[PromptImage, ...] = ()
    fork_of: int | None = None  # seq_id of another choice of the same request, sent before it
    num_replays: int = 0  # worker deaths since its last token
    worker_id: int | None = None  # None: queued
    first_token_at: float | None = None  # seconds
    handed_over: float = 0.0  # seconds, when worker_id is set
    preempted_from: int | None = None  # worker_id, until it is handed over again

    @property
    def arrival(self) -> float:
        return self.ticket.arrival

    @property
    def arrival_order(self) -> int:
        return self.ticket.order

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Add:
    """Send this sequence to the worker, at once: its ``token_ids`` grow with its outputs."""

    worker_id: int
    sequence: DispatchedSequence


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell the worker to drop this sequence."""

    worker_id: int
    seq_id: int


Command = Add | Abort


@dataclass(slots=True)  # frozen, one would take three times as long to make
class Delivery:
    """News for one sequence's client; the final one, and no other, has a finish_reason."""

    seq_id: int
    token: SampledToken | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: RequestError | None = None  # set when finish_reason is ERROR
    prompt_logprobs: tuple[SampledToken, ...] = ()
    embedding: tuple[float, ...] = ()
