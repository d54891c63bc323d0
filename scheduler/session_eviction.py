"""Lossy eviction within one sequence: which of its own KV blocks go when its budget is full.

A sequence under such a policy holds at most ``kv_budget`` tokens of keys and values, whatever its
length. Its block table is *compact*: dropped blocks leave it and later ones move up. Positions stay
the true ones, for RoPE and for the limit of the context, while the token at position p lies at
*cache index* p - num_evicted_tokens, which is what slots and attention use.

Blocks go only when the table is full and a further token is to be computed. So the positions at
which blocks go follow from the budget alone, however the tokens between them came: in chunks, one
by one, again after a preemption or on another worker. What goes is chosen from the sequence's own
past. The attention mass of ``h2o`` is counted in whole numbers, so no order of summation matters.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from shoal.scheduler.block_pool import num_blocks_for

LRU = "lru"
ATTENTION_SINK = "attention_sink"
H2O = "h2o"
KV_POLICIES = (LRU, ATTENTION_SINK, H2O)

MIN_KV_BUDGET = 64  # tokens
_MIN_BLOCKS = 4  # a sink, a recent one, and two to choose from
_NUM_SINK_TOKENS = 4  # StreamingLLM's, rounded up to whole blocks
_STRIDE_PARTS = 8  # an eighth of the budget goes at once, so that prompts come in long chunks
_MAX_STRIDE_TOKENS = 128


class SessionPolicy(Protocol):
    """Chooses from a full table, by nothing but the table itself."""

    @property
    def needs_mass(self) -> bool:
        """Whether ``mass`` must be measured; without, it is all zeros."""
        ...

    def choose(self, mass: SequenceOf[int], num_dropped: int) -> list[int]:
        """Which ``num_dropped`` of the ``len(mass)`` blocks go: their indices, ascending.

        ``mass[i]`` is the attention that the block at index i of the compact table got so far.
        """
        ...


@dataclass(frozen=True, slots=True)
class SinkPolicy:
    """Keeps the first blocks and the recent ones: StreamingLLM (arXiv 2309.17453).

    The first tokens gather the attention that goes nowhere else; without them, that is as a plain
    window (``num_sink_blocks=0``), the model falls apart.
    """

    num_sink_blocks: int
    needs_mass: bool = field(default=False, init=False)

    def choose(self, mass: SequenceOf[int], num_dropped: int) -> list[int]:
        return list(range(self.num_sink_blocks, self.num_sink_blocks + num_dropped))


@dataclass(frozen=True, slots=True)
class HeavyHitterPolicy:
    """Keeps the sinks, the recent blocks and, between them, those with the most attention mass.

    H2O (arXiv 2306.14048), by block instead of by token and head. Of equals the oldest goes. The
    mass loses a quarter with each eviction: as a plain sum it would favour whatever came early, and
    what it once kept would stay for good.
    """

    num_sink_blocks: int
    num_recent_blocks: int
    needs_mass: bool = field(default=True, init=False)

    def choose(self, mass: SequenceOf[int], num_dropped: int) -> list[int]:
        candidates = range(self.num_sink_blocks, len(mass) - self.num_recent_blocks)
        assert num_dropped <= len(candidates)
        return sorted(sorted(candidates, key=mass.__getitem__)[:num_dropped])


@dataclass(slots=True, eq=False)
class SessionEviction:
    """The budget of one sequence and what its policy has to know. Owned by that sequence.

    ``mass`` follows the compact table, block by block, and loses a quarter with each eviction.
    """

    policy: SessionPolicy
    num_blocks: int  # the budget
    num_dropped: int  # blocks that go at once
    block_size: int
    mass: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as when the sequence lost its blocks."""
        self.mass = [0] * self.num_blocks

    def room(self, num_held_tokens: int) -> int:
        """How many tokens fit beside those that are held."""
        return self.num_blocks * self.block_size - num_held_tokens

    def observe(self, block_mass: Iterable[int]) -> None:
        """Add the attention mass of one step, by block of the compact table."""
        for idx, value in enumerate(block_mass):
            self.mass[idx] += value

    def evict(self) -> list[int]:
        """Choose blocks of a full table; their indices, ascending. The caller drops them."""
        dropped = self.policy.choose(self.mass, self.num_dropped)
        gone = set(dropped)
        kept = [value * 3 // 4 for idx, value in enumerate(self.mass) if idx not in gone]
        self.mass = kept + [0] * len(dropped)
        return dropped


def budget_blocks(kv_budget: int, block_size: int) -> int:
    """The blocks that a budget in tokens allows: whole ones, and never less than four."""
    return max(_MIN_BLOCKS, num_blocks_for(kv_budget, block_size))


def make_session_eviction(kv_policy: str, kv_budget: int, block_size: int) -> SessionEviction:
    """The state of a new sequence under a lossy policy: ``attention_sink`` or ``h2o``."""
    num_blocks = budget_blocks(kv_budget, block_size)
    num_dropped = max(1, min(num_blocks // _STRIDE_PARTS, _MAX_STRIDE_TOKENS // block_size))
    num_sinks = num_blocks_for(_NUM_SINK_TOKENS, block_size)
    policy: SessionPolicy
    if kv_policy == ATTENTION_SINK:
        policy = SinkPolicy(num_sinks)
    else:
        assert kv_policy == H2O
        num_others = max(2 * num_dropped, num_blocks // 4)  # half of them at most go at once
        policy = HeavyHitterPolicy(num_sinks, num_blocks - num_sinks - num_others)
    return SessionEviction(policy, num_blocks, num_dropped, block_size)
