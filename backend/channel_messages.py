"""What one client process and a model's backend say to each other over a channel.

A channel is one Triton request that stays open: its responses carry what all requests of a client
process gained, together. Requests are sent as orders, small Triton requests that end at once.
Both ends import this; it knows neither Triton nor gRPC.
"""

import msgspec

# Responses that may be on their way unread; beyond, what comes is joined until some were read.
# An order costs a few times what a response does, so they are not told often.
WINDOW = 64
ACK_EVERY = 32
# So long after the last response another one goes out even so: a version that is being unloaded
# gets no more orders, and so is not told what was read.
UNREAD_PACE_S = 0.25
# A channel with requests says something so often, so that its client can tell a long prompt from a
# process that has died.
PULSE_S = 1.0
# A channel with no request for so long is ended: an open request keeps a model from unloading.
IDLE_S = 1.0
# Shorter waits of a submission with its client are not worth telling.
TELL_WAIT_MS = 50
MAX_WAIT_MS = 600_000


class Submission(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to generate; ``ref`` is its name in its channel. Texts are UTF-8.

    ``messages`` and ``sampling`` hold JSON. See codec.INPUTS for what each means.
    """

    ref: int
    text_input: bytes | None = None
    messages: bytes | None = None
    input_ids: list[int] | None = None
    sampling: bytes = b"{}"
    stream: bool = True
    return_logprobs: bool = False
    return_token_ids: bool = False
    echo: bool = False
    parameters: dict[str, str | int | bool] = {}
    request_id: str = ""  # the client's name for it, for the log


class ChannelOrders(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a client. Submissions are Submission structs, each encoded apart, so that a
    fault with one harms no other."""

    channel: str
    opens: bool = False  # this very Triton request becomes the channel
    submissions: list[msgspec.Raw] = []
    cancellations: list[int] = []  # refs
    num_read: int = 0  # responses of the channel that the client has read so far
    waited_ms: list[int] = []  # each submission with its client before this; empty: not worth it

    @property
    def waited_s(self) -> list[float]:
        """For each submission, in [0, MAX_WAIT_MS / 1000]."""
        told = [min(max(waited, 0), MAX_WAIT_MS) / 1000 for waited in self.waited_ms]
        missing = len(self.submissions) - len(told)
        return told[: len(self.submissions)] + [0.0] * missing


class ChannelError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request failed, as RequestError.to_dict says it."""

    message: str
    type: str | None = None
    code: str | None = None
    param: str | None = None
    status: int = 500
    retry_after_ms: int | None = None


class ChannelDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one choice of one request gained, as client.types.Delta says it."""

    ref: int
    text: str = ""
    index: int = 0
    token_ids: list[int] = []
    num_output_tokens: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    logprobs: str | None = None
    prompt_logprobs: str | None = None
    tool_calls: str | None = None
    reasoning: str = ""
    embedding: bytes = b""  # float32, little-endian
    error: ChannelError | None = None  # the request ends with it


class ChannelNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """One response of a channel, or the answer to orders for a channel that is not open."""

    deltas: list[ChannelDelta] | list[msgspec.Raw] = []
    is_unknown: bool = False  # no such channel: nothing of the orders was taken
    is_idle: bool = False  # the channel ends, as no request is open in it


class ReadNews(msgspec.Struct, frozen=True):
    """ChannelNews as its reader decodes it."""

    deltas: list[ChannelDelta] = []
    is_unknown: bool = False
    is_idle: bool = False
