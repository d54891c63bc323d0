"""Sequences that begin as another one does and wait until that beginning is computed."""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.scheduler.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Fork:
    """``child`` can start from the first ``num_shared`` tokens of ``parent``."""

    parent: Sequence
    child: Sequence
    num_shared: int  # tokens; one of the child's is always left to compute

    @classmethod
    def of(cls, parent: Sequence, child: Sequence) -> "Fork":
        """Of all tokens that the two have in common now."""
        return cls(parent, child, _num_common(parent, child))

    @property
    def is_ready(self) -> bool:
        """Whether the parent has computed, and holds, all that is shared."""
        return (
            self.parent.status is SequenceStatus.RUNNING
            and self.parent.num_computed_tokens >= self.num_shared
        )


class Forks:
    """The forks of a scheduler whose children do not run yet.

    A child is *held* until its parent is ready, then it is among the scheduler's waiting, and its
    fork is of use as long as the parent stays ready. Owned by the scheduler.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Fork]] = {}  # by the parent's seq_id
        self._released: dict[int, Fork] = {}  # by the child's

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    @property
    def num_held(self) -> int:
        return sum(map(len, self._held.values()))

    def held(self) -> Iterator[Sequence]:
        """The children that nobody else keeps."""
        for forks in self._held.values():
            for fork in forks:
                yield fork.child

    def hold(self, fork: Fork) -> None:
        """Take over a child until its parent is ready."""
        self._held.setdefault(fork.parent.seq_id, []).append(fork)

    def release_ready(self, parent: Sequence) -> list[Sequence]:
        """The children for which the parent is ready now: theirs is to wait like others."""
        forks = self._held.get(parent.seq_id)
        if forks is None:
            return []
        ready = [fork for fork in forks if fork.is_ready]
        self._keep(parent, [fork for fork in forks if not fork.is_ready])
        self._released |= {fork.child.seq_id: fork for fork in ready}
        return [fork.child for fork in ready]

    def usable_for(self, child: Sequence) -> Fork | None:
        """The fork by which a waiting child can start now."""
        fork = self._released.get(child.seq_id)
        return fork if fork is not None and fork.is_ready else None

    def started(self, child: Sequence) -> None:
        """The child runs, by its fork or without."""
        self._released.pop(child.seq_id, None)

    def finished(self, sequence: Sequence) -> Sequence | None:
        """A sequence is gone. Of its held children the first goes to wait like others, which the
        caller sees to, and the rest are held for that one."""
        self._released.pop(sequence.seq_id, None)
        forks = self._held.pop(sequence.seq_id, None)
        if forks is None:
            return None
        heir = forks[0].child
        for fork in forks[1:]:
            self.hold(Fork.of(heir, fork.child))
        return heir

    def drop_held(self, child: Sequence) -> bool:
        """Forget a held child; False if it is not one."""
        for forks in self._held.values():
            for fork in forks:
                if fork.child is child:
                    self._keep(fork.parent, [other for other in forks if other is not fork])
                    return True
        return False

    def _keep(self, parent: Sequence, forks: list[Fork]) -> None:
        if forks:
            self._held[parent.seq_id] = forks
        else:
            self._held.pop(parent.seq_id, None)


def _num_common(parent: Sequence, child: Sequence) -> int:
    most = min(parent.num_tokens, child.num_tokens - 1)
    ours, theirs = parent.cache_keys, child.cache_keys
    if ours[:most] == theirs[:most]:
        return most
    return next(idx for idx in range(most) if ours[idx] != theirs[idx])
