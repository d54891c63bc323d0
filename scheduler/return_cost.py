"""What it costs a preempted sequence to come back: copied to host and again, or computed again."""

from dataclasses import dataclass
from enum import StrEnum


class ReturnWay(StrEnum):
    """How a preempted sequence gets its keys and values again."""

    CACHED = "cached"  # they stay in the prefix tree, and move to the host as others need the room
    CHECKPOINT = "checkpoint"  # copied to the host at once, and from there again
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class ReturnCosts:
    """Seconds, measured when the engine starts.

    A copy's are for one block of each KV group. The prefill's are for a token of a long chunk and
    leave attention's growth with the context out: they favour recompute, slightly.
    """

    save_s: tuple[float, ...]  # device to host, by group
    restore_s: tuple[float, ...]  # host to device, by group
    prefill_s: float

    def copy(self, num_blocks: tuple[int, ...]) -> float:
        """There and back."""
        return sum(
            count * (save + restore)
            for count, save, restore in zip(num_blocks, self.save_s, self.restore_s, strict=True)
        )

    def recompute(self, num_tokens: int) -> float:
        return num_tokens * self.prefill_s

    def demoting_pays(self, block_size: int) -> bool:
        """Whether a prefix block is worth a copy to the host, if it is asked for again."""
        return self.save_s[0] + self.restore_s[0] < self.recompute(block_size)

    def restoring_pays(self, block_size: int) -> bool:
        """Whether a block that is on the host should come back, rather than be computed."""
        return self.restore_s[0] < self.recompute(block_size)


UNMEASURED = ReturnCosts((), (), 1e-3)  # without a host tier only the order of prices matters


@dataclass(frozen=True, slots=True)
class ReturnPlan:
    """The cheaper way back of one sequence, and both prices in seconds."""

    way: ReturnWay
    num_tokens: int  # computed ones that would be lost
    num_blocks: int  # of the first group that would be free
    copy_s: float | None  # None: there is no host memory for it
    recompute_s: float

    @classmethod
    def choose(
        cls,
        num_tokens: int,
        num_blocks: int,
        recompute_s: float,
        copy_way: ReturnWay,
        copy_s: float | None,
    ) -> "ReturnPlan":
        """``copy_way``, where there is room for it and it is the cheaper."""
        copies = copy_s is not None and copy_s < recompute_s
        way = copy_way if copies else ReturnWay.RECOMPUTE
        return cls(way, num_tokens, num_blocks, copy_s, recompute_s)

    @property
    def seconds(self) -> float:
        if self.way is ReturnWay.RECOMPUTE or self.copy_s is None:
            return self.recompute_s
        return self.copy_s
