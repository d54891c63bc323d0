"""The workloads by name: replays of real traces, and synthetic ones with one property each.

Every generator draws from its own seeded stream, so a workload is a pure function of its options.
Rates are given as a share of what the simulated machine can do: ``load=1`` saturates it.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.load.trace_replay import azure_conversations, mooncake_conversations
from shoal.load.workload import Lengths, Request, Segment, Tier, Workload

# Requests per second at saturation, given the lengths of all requests.
Capacity = Callable[[Sequence[Lengths]], float]

MEDIAN_PROMPT, PROMPT_SIGMA, MAX_PROMPT = 96, 0.9, 1500  # log-normal; about Azure's, over 12
MEDIAN_OUTPUT, OUTPUT_SIGMA, MAX_OUTPUT = 16, 0.8, 256
NUM_SYSTEM_PROMPTS, SYSTEM_PROMPT_TOKENS = 20, 512
FLOOD_FACTOR = 10
LIGHT_LOAD = 0.2
OVERLOAD_FACTOR = 10.0
TIERS = {
    "interactive": Tier(ttft_ms=5000, tpot_ms=2000, weight=8.0),
    "standard": Tier(ttft_ms=15_000, tpot_ms=2000, weight=2.0),
    "batch": Tier(ttft_ms=120_000, tpot_ms=4000, weight=1.0),
}


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """``num_requests=None`` is the workload's own number, of a trace all of it."""

    capacity: Capacity
    seed: int = 0
    num_requests: int | None = None
    load: float | None = None  # None: the workload's own
    length_divisor: float = 16.0  # of the traces
    time_factor: float | None = None  # of the traces; None: what gives ``load``


class _Draw:
    """The random choices that the generators share."""

    def __init__(self, seed: int, stream: str) -> None:
        self.random = random.Random(f"{stream}:{seed}")
        self._stream = f"{stream}:{seed}"
        self._num_keys = itertools.count()

    def lengths(self) -> Lengths:
        prompt = self.random.lognormvariate(0.0, PROMPT_SIGMA) * MEDIAN_PROMPT
        return Lengths(max(4, min(MAX_PROMPT, round(prompt))), self.output_length())

    def output_length(self) -> int:
        output = self.random.lognormvariate(0.0, OUTPUT_SIGMA) * MEDIAN_OUTPUT
        return max(1, min(MAX_OUTPUT, round(output)))

    def poisson(self, rate: float, start: float = 0.0) -> Iterator[float]:
        """Arrival times without end."""
        time = start
        while True:
            time += self.random.expovariate(rate)
            yield time

    def fresh(self, num_tokens: int) -> Segment:
        """A text that nobody else has."""
        return Segment(f"{self._stream}:{next(self._num_keys)}", num_tokens)

    def zipf(self, num_items: int, exponent: float = 1.0) -> Callable[[], int]:
        """Draws 0 most often, ``num_items - 1`` least."""
        weights = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(num_items)))
        return lambda: self.random.choices(range(num_items), cum_weights=weights)[0]

    def request(self, arrival: float, lengths: Lengths, *prefix: Segment) -> Request:
        """A request of the given lengths after a shared prefix."""
        return Request(arrival, (*prefix, self.fresh(lengths.prompt)), self.fresh(lengths.output))


def _rate(options: WorkloadOptions, load: float, lengths: Iterable[Lengths]) -> float:
    """Requests per second that give this share of the capacity."""
    return load * options.capacity(list(lengths))


def poisson(options: WorkloadOptions) -> Workload:
    """Independent arrivals, log-normal lengths."""
    draw = _Draw(options.seed, "poisson")
    load = options.load or 0.7
    lengths = [draw.lengths() for _ in range(options.num_requests or 2000)]
    rate = _rate(options, load, lengths)
    requests = [draw.request(*pair) for pair in zip(draw.poisson(rate), lengths, strict=False)]
    return Workload("poisson", f"Poisson at {rate:.2f} requests/s (load {load:g}).", requests)


def bursts(options: WorkloadOptions) -> Workload:
    """Half of the requests arrive evenly, the other half in one second out of each thirty."""
    draw = _Draw(options.seed, "bursts")
    load = options.load or 0.6
    lengths = [draw.lengths() for _ in range(options.num_requests or 2000)]
    rate = _rate(options, load, lengths)
    period = 30.0
    requests = []
    for arrival, item in zip(draw.poisson(rate), lengths, strict=False):
        if draw.random.random() < 0.5:
            arrival = arrival // period * period + draw.random.random()
        requests.append(draw.request(arrival, item))
    description = (
        f"Mean {rate:.2f} requests/s (load {load:g}); half of them in 1 s of every {period:g} s."
    )
    return Workload("bursts", description, requests)


def chat(options: WorkloadOptions) -> Workload:
    """Chats of 1 to 8 turns: each turn sends all before it, and comes after the user has read."""
    draw = _Draw(options.seed, "chat")
    load = options.load or 0.6
    system = draw.fresh(64)
    openings: list[Request] = []
    lengths: list[Lengths] = []
    num_left = options.num_requests or 2000
    while num_left > 0:
        num_turns = min(num_left, draw.random.randint(1, 8))
        turns = _turns(draw, system, num_turns)
        openings.append(turns[0])
        lengths += [turn.lengths for turn in turns]
        num_left -= num_turns
    rate = _rate(options, load, lengths)
    chat_rate = rate * len(openings) / len(lengths)
    for request, arrival in zip(openings, draw.poisson(chat_rate), strict=False):
        request.arrival = arrival
    description = (
        f"{len(openings)} chats of 1 to 8 turns, {chat_rate:.2f} new ones/s (load {load:g} without "
        "a prefix cache); 2 to 20 s between an answer and the next question."
    )
    return Workload("chat", description, openings)


def _turns(draw: _Draw, system: Segment, num_turns: int) -> list[Request]:
    history: tuple[Segment, ...] = (system,)
    turns: list[Request] = []
    for _ in range(num_turns):
        question = draw.fresh(draw.random.randint(8, 64))
        answer = draw.fresh(draw.output_length())
        think_s = draw.random.uniform(2.0, 20.0) if turns else 0.0
        turn = Request(think_s, (*history, question), answer)
        if turns:
            turns[-1].follow_up = turn
        turns.append(turn)
        history = (*history, question, answer)
    return turns


def system_prompts(options: WorkloadOptions) -> Workload:
    """A few long system prompts, each followed by a short question of its own."""
    draw = _Draw(options.seed, "system_prompts")
    load = options.load or 0.7
    prompts = [draw.fresh(SYSTEM_PROMPT_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS)]
    choose = draw.zipf(NUM_SYSTEM_PROMPTS)
    lengths = [
        Lengths(draw.random.randint(8, 64), draw.output_length())
        for _ in range(options.num_requests or 1000)
    ]
    whole = [Lengths(SYSTEM_PROMPT_TOKENS + item.prompt, item.output) for item in lengths]
    rate = _rate(options, load, whole)
    requests = [
        draw.request(arrival, item, prompts[choose()])
        for arrival, item in zip(draw.poisson(rate), lengths, strict=False)
    ]
    description = (
        f"{NUM_SYSTEM_PROMPTS} system prompts of {SYSTEM_PROMPT_TOKENS} tokens, popularity by "
        f"Zipf's law, {rate:.2f} requests/s (load {load:g} without a prefix cache)."
    )
    return Workload("system_prompts", description, requests)


def scans(options: WorkloadOptions) -> Workload:
    """Popular documents that are asked again, and one sweep after another over ones read once."""
    draw = _Draw(options.seed, "scans")
    load = options.load or 0.7
    hot = [draw.fresh(draw.random.randint(128, 512)) for _ in range(40)]
    choose = draw.zipf(len(hot))
    pieces: list[tuple[tuple[Segment, ...], Lengths]] = []
    num_requests = options.num_requests or 2000
    while len(pieces) < num_requests:
        # A sweep of 25 documents in a row, after 75 questions about the popular ones.
        is_sweep = len(pieces) % 100 >= 75
        question = Lengths(draw.random.randint(8, 48), draw.output_length())
        document = draw.fresh(512) if is_sweep else hot[choose()]
        pieces.append(((document,), question))
    rate = _rate(options, load, (Lengths(p[0].num_tokens + q.prompt, q.output) for p, q in pieces))
    requests = [
        draw.request(arrival, question, *prefix)
        for arrival, (prefix, question) in zip(draw.poisson(rate), pieces, strict=False)
    ]
    description = (
        f"{len(hot)} popular documents; of every 100 requests 25 in a row sweep over documents "
        f"read once; {rate:.2f} requests/s (load {load:g} without a prefix cache)."
    )
    return Workload("scans", description, requests)


def long_documents(options: WorkloadOptions) -> Workload:
    """One request in ten has a prompt of 2,000 to 6,000 tokens; the others are short."""
    draw = _Draw(options.seed, "long_documents")
    load = options.load or 0.7
    lengths = [
        Lengths(draw.random.randint(2000, 6000), draw.output_length())
        if draw.random.random() < 0.1
        else draw.lengths()
        for _ in range(options.num_requests or 1000)
    ]
    rate = _rate(options, load, lengths)
    requests = [draw.request(*pair) for pair in zip(draw.poisson(rate), lengths, strict=False)]
    for request in requests:
        request.tenant = "documents" if request.num_prompt_tokens >= 2000 else "short"
    description = f"10 % documents of 2,000 to 6,000 tokens; {rate:.2f} requests/s (load {load:g})."
    return Workload("long_documents", description, requests)


def two_tenants(options: WorkloadOptions) -> Workload:
    """A light tenant, and one that sends ten times as much: together beyond the capacity."""
    light = light_alone(options)
    flood = _tenant(options, "flood", FLOOD_FACTOR)
    description = f"{light.description} Beside it another sends {FLOOD_FACTOR} times as much."
    return Workload("two_tenants", description, light.requests + flood)


def light_alone(options: WorkloadOptions) -> Workload:
    """The light tenant of ``two_tenants``, same requests and times, without the other."""
    load = options.load or LIGHT_LOAD
    description = f"A tenant with load {load:g}, Poisson."
    return Workload("light_alone", description, _tenant(options, "light", 1))


def _tenant(options: WorkloadOptions, tenant: str, factor: int) -> list[Request]:
    draw = _Draw(options.seed, f"tenant-{tenant}")
    load = options.load or LIGHT_LOAD
    num_requests = max(1, (options.num_requests or 2200) // (FLOOD_FACTOR + 1)) * factor
    lengths = [draw.lengths() for _ in range(num_requests)]
    rate = factor * _rate(options, load, lengths)
    requests = [draw.request(*pair) for pair in zip(draw.poisson(rate), lengths, strict=False)]
    for request in requests:
        request.tenant = tenant
    return requests


def saturating_tenants(options: WorkloadOptions) -> Workload:
    """Three tenants with weights 1, 2 and 4 that each want more than everything."""
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    load = options.load or 1.5
    requests: list[Request] = []
    for tenant in weights:
        draw = _Draw(options.seed, f"saturating-{tenant}")
        lengths = [draw.lengths() for _ in range((options.num_requests or 3000) // len(weights))]
        rate = _rate(options, load, lengths)
        for arrival, item in zip(draw.poisson(rate), lengths, strict=False):
            requests.append(draw.request(arrival, item))
            requests[-1].tenant = tenant
    description = f"Three tenants of weights 1, 2 and 4, each with load {load:g}."
    return Workload("saturating_tenants", description, requests, tenant_weights=weights)


def sla_tiers(options: WorkloadOptions) -> Workload:
    """Three tiers in equal parts, together just beyond the capacity."""
    draw = _Draw(options.seed, "sla_tiers")
    load = options.load or 1.2
    lengths = [draw.lengths() for _ in range(options.num_requests or 2000)]
    rate = _rate(options, load, lengths)
    requests = [draw.request(*pair) for pair in zip(draw.poisson(rate), lengths, strict=False)]
    names = list(TIERS)
    for request in requests:
        request.slo_class = draw.random.choice(names)
    description = f"Tiers {', '.join(names)} in equal parts; {rate:.2f} requests/s (load {load:g})."
    return Workload("sla_tiers", description, requests, tiers=TIERS)


def overload(options: WorkloadOptions) -> Workload:
    """Ten times what the machine can do."""
    draw = _Draw(options.seed, "overload")
    load = options.load or OVERLOAD_FACTOR
    lengths = [draw.lengths() for _ in range(options.num_requests or 5000)]
    rate = _rate(options, load, lengths)
    requests = [draw.request(*pair) for pair in zip(draw.poisson(rate), lengths, strict=False)]
    description = f"Poisson at {rate:.2f} requests/s: {load:g} times the capacity."
    return Workload("overload", description, requests)


def azure(options: WorkloadOptions) -> Workload:
    """Azure's chat trace of 2023: real arrival times and lengths, no shared prefixes known."""
    requests = azure_conversations(options.length_divisor, options.num_requests)
    return _replay("azure", "Azure LLM inference trace 2023 (conversation)", requests, options)


def mooncake(options: WorkloadOptions) -> Workload:
    """Mooncake's chat trace: real arrival times, lengths and shared prefixes."""
    requests = mooncake_conversations(options.length_divisor, options.num_requests)
    return _replay("mooncake", "Mooncake conversation trace (FAST 2025)", requests, options)


def _replay(name: str, source: str, requests: list[Request], options: WorkloadOptions) -> Workload:
    """Stretch or squeeze the trace's time to the wanted load."""
    span = requests[-1].arrival - requests[0].arrival or 1.0
    factor = options.time_factor
    own_rate = len(requests) / span
    lengths = [request.lengths for request in requests]
    if factor is None:
        factor = own_rate / _rate(options, options.load or 0.7, lengths)
    for request in requests:
        request.arrival *= factor
    load = own_rate / factor / _rate(options, 1.0, lengths)
    description = (
        f"{source}: {len(requests)} requests, all lengths divided by {options.length_divisor:g}, "
        f"all times multiplied by {factor:.3g}: {own_rate / factor:.2f} requests/s (load {load:.2f}"
        + (" without a prefix cache)." if name == "mooncake" else ").")
    )
    return Workload(name, description, requests)


WORKLOADS: dict[str, Callable[[WorkloadOptions], Workload]] = {
    "azure": azure,
    "mooncake": mooncake,
    "poisson": poisson,
    "bursts": bursts,
    "chat": chat,
    "system_prompts": system_prompts,
    "scans": scans,
    "long_documents": long_documents,
    "two_tenants": two_tenants,
    "light_alone": light_alone,
    "saturating_tenants": saturating_tenants,
    "sla_tiers": sla_tiers,
    "overload": overload,
}
