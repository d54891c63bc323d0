"""Which cached prefix to give up first: one small interface, three policies.

A policy never sees the tree. It sees `NodeUsage`, the history of one run of blocks, and answers
with a `Score`. The prefix tree keeps the runs that may go in a heap by that score.
"""

from copy import copy
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from shoal.scheduler.reuse_model import ReuseModel


@dataclass(slots=True, eq=False)
class NodeUsage:
    """The history of one run of blocks; it outlives the blocks in a policy's ghost history.

    A use is one finished request. Blocks of a request that still runs are `num_uses == 0`.
    """

    num_blocks: int  # blocks that share this history, cached or remembered
    depth: int  # blocks before the run on its path
    turn: int  # how many earlier requests the path builds on
    last_used: float  # clock time
    last_tick: int  # order of use, unique, so that equal times still have an order
    is_tail: bool = False  # ended its prompt: seldom a prefix of the next turn
    num_uses: int = 0
    num_branches: int = 0  # distinct continuations ever inserted below
    parent_branches: int = 0  # the same of the run above, when this one was inserted
    last_gap: float = 0.0  # between the last two uses; a new run takes over its parent's
    last_growth: int = 0  # blocks that its last request added to the path
    last_output: int = 0  # tokens that its last request generated
    features: tuple[int, ...] = ()  # the policy's summary of the above

    @property
    def num_hits(self) -> int:
        return max(0, self.num_uses - 1)

    def fork(self, num_blocks: int) -> "NodeUsage":
        """Split `num_blocks` off into a history of their own; the caller sets the depths right."""
        head = copy(self)
        head.num_blocks = num_blocks
        self.num_blocks -= num_blocks
        return head


class Score(NamedTuple):
    """Lowest goes first. After `valid_until` (clock time) it has to be asked for again."""

    value: float
    valid_until: float = inf


class EvictionPolicy(Protocol):
    """What the prefix tree tells and asks; all times come from the tree's clock.

    With `keeps_history`, `on_evict` and `recall` get a key for each block's path; the last block of
    each insert is then a run of its own, because it fares differently.
    """

    @property
    def keeps_history(self) -> bool: ...

    def on_hit(self, usage: NodeUsage, now: float) -> None:
        """The run is about to be used again; its history still ends with the use before."""

    def on_use(self, usage: NodeUsage, now: float) -> None:
        """The run was used, the first time or again; its history is up to date."""

    def on_evict(self, usage: NodeUsage, path_key: int) -> None:
        """One block of the run left the cache."""

    def recall(self, path_key: int) -> NodeUsage | None:
        """The history of an evicted block that now comes back; forgets it."""

    def score(self, usage: NodeUsage, now: float) -> Score:
        """How much the run is worth keeping."""


class LruPolicy:
    """Least recently used first."""

    keeps_history = False

    def on_hit(self, usage: NodeUsage, now: float) -> None:
        pass

    def on_use(self, usage: NodeUsage, now: float) -> None:
        pass

    def on_evict(self, usage: NodeUsage, path_key: int) -> None:
        pass

    def recall(self, path_key: int) -> NodeUsage | None:
        return None

    def score(self, usage: NodeUsage, now: float) -> Score:
        return Score(usage.last_tick)


class LfuPolicy(LruPolicy):
    """Fewest hits while cached first; the least recently used of equals."""

    def score(self, usage: NodeUsage, now: float) -> Score:
        # 12 bits of hits above 40 bits of ticks: both are exact in a float.
        return Score(min(usage.num_hits, 4095) * float(1 << 40) + usage.last_tick)


GHOSTS_PER_BLOCK = 20  # evicted blocks whose history ReusePolicy keeps, for each block of the pool


class ReusePolicy:
    """Lowest expected hits per block and second first, learned online from this cache's traffic.

    `ReuseModel` learns how soon runs with a like history are used again, cached or not: blocks that
    were evicted stay known to a bounded ghost history, so that a return after eviction counts too,
    and a run that comes back takes up its history where it was. What the model looks at is in
    `_features_of`. Deep blocks cost more to compute again: attention over `depth` earlier blocks
    adds `depth / attention_parity_blocks` to the price of a block (never, if infinite).
    """

    keeps_history = True

    def __init__(
        self,
        max_ghost_blocks: int,
        attention_parity_blocks: float = inf,
        model: ReuseModel | None = None,
    ) -> None:
        self.max_ghost_blocks = max_ghost_blocks
        self.attention_parity_blocks = attention_parity_blocks
        self._model = model or ReuseModel()
        self._ghosts: dict[int, NodeUsage] = {}  # in order of eviction

    @property
    def num_ghost_blocks(self) -> int:
        return len(self._ghosts)

    def on_hit(self, usage: NodeUsage, now: float) -> None:
        self._model.returned(usage, now)

    def on_use(self, usage: NodeUsage, now: float) -> None:
        usage.features = _features_of(usage)
        self._model.begin(usage, now)

    def on_evict(self, usage: NodeUsage, path_key: int) -> None:
        replaced = self._ghosts.pop(path_key, None)
        if replaced is not None:
            replaced.num_blocks -= 1
        self._ghosts[path_key] = usage
        if len(self._ghosts) > self.max_ghost_blocks:
            self._ghosts.pop(next(iter(self._ghosts))).num_blocks -= 1

    def recall(self, path_key: int) -> NodeUsage | None:
        return self._ghosts.pop(path_key, None)

    def score(self, usage: NodeUsage, now: float) -> Score:
        density, valid_until = self._model.hit_density(usage, now)
        return Score(density * (1.0 + usage.depth / self.attention_parity_blocks), valid_until)


def _features_of(usage: NodeUsage) -> tuple[int, ...]:
    """One number for each trait: the trait's number times 1000, plus its coarse value.

    A never-hit run is known by its turn, its size, the rhythm of its session and how shared its
    parent is; a run with hits by their count, its rhythm, its fan-out, its size, its turn and what
    its last request added. Both: that addition relative to the path, the length of the path, and
    the length of the last output at this stage of the session.
    """
    tail = int(usage.is_tail)
    gap = _log_bucket(int(usage.last_gap / 10), 8)
    size = _log_bucket(usage.num_blocks, 10)
    turn = min(usage.turn, 5)
    path = usage.depth + usage.num_blocks
    growth = _log_bucket(8 * usage.last_growth // path, 6)
    session = min(usage.num_hits + usage.turn, 4)  # how many earlier turns are known of
    output = _log_bucket(usage.last_output, 16)
    both = (
        4000 + growth * 2 + tail,
        5000 + (output * 5 + session) * 2 + tail,
        6000 + _log_bucket(path, 16) * 2 + tail,
    )
    if usage.num_hits == 0:
        return (
            turn * 2 + tail,
            1000 + (min(turn, 2) * 11 + size) * 2 + tail,
            2000 + gap * 2 + tail,
            3000 + min(usage.parent_branches, 4) * 3 + min(turn, 2),
            *both,
        )
    return (
        7000 + _log_bucket(usage.num_hits, 8),
        8000 + _log_bucket(usage.last_growth, 10),
        9000 + gap,
        10000 + min(usage.num_branches, 4),
        11000 + size,
        12000 + min(turn, 3),
        *both,
    )


def _log_bucket(value: int, largest: int) -> int:
    return min(value.bit_length(), largest)


def make_eviction_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """The policy of that name for a pool of so many blocks. Raises ValueError on another name."""
    if name == "lru":
        return LruPolicy()
    if name == "lfu":
        return LfuPolicy()
    if name == "reuse":
        return ReusePolicy(GHOSTS_PER_BLOCK * num_blocks)
    raise ValueError(f"eviction policy {name!r} is not known; there are lru, lfu and reuse.")
