"""Unlocked leaves of the prefix tree, the one to give up first on top."""

from heapq import heapify, heappop, heappush

from shoal.scheduler.eviction import EvictionPolicy
from shoal.scheduler.prefix_nodes import PrefixNode

_SLACK = 64  # entries of leaves that are none any more, beyond as many as there are leaves

Entry = tuple[float, int, PrefixNode]


class EvictionCandidates:
    """By the policy's scores, which are made anew when they lose their validity.

    A leaf has one valid entry, whose number is its ``stamp``; others are skipped when they come up.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._stamp = 0
        self._num = 0
        self._heap: list[Entry] = []  # by score
        self._expiry: list[Entry] = []  # by the end of a score's validity

    def __len__(self) -> int:
        return self._num

    def add(self, node: PrefixNode, now: float) -> None:
        """Put in a node, unless it is there, has a child or a lock, or is a root."""
        if node.children or node.parent is None or node.stamp or node.num_locks:
            return
        self._num += 1
        self._push(node, now)
        self._heap = self._tidied(self._heap)
        self._expiry = self._tidied(self._expiry)

    def drop(self, node: PrefixNode) -> None:
        """Take out a node if it is there."""
        if node.stamp:
            node.stamp = 0
            self._num -= 1

    def refresh(self, now: float) -> None:
        """Score those again whose score is no longer valid."""
        expired = []  # pushed afterwards, so that a score that is stale at once cannot loop
        while self._expiry and self._expiry[0][0] <= now:
            _, stamp, node = heappop(self._expiry)
            if stamp == node.stamp:
                expired.append(node)
        for node in expired:
            self._push(node, now)

    def worst(self) -> PrefixNode | None:
        """The one to give up first; it stays in. None: there is none."""
        while self._heap:
            _, stamp, node = self._heap[0]
            if stamp == node.stamp:
                return node
            heappop(self._heap)
        return None

    def check_integrity(self, num_stamped: int) -> None:
        """Compare with the number of nodes that have a stamp."""
        assert num_stamped == self._num
        assert sum(stamp == node.stamp for _, stamp, node in self._heap) == num_stamped

    def _push(self, node: PrefixNode, now: float) -> None:
        score = self._policy.score(node.usage, now)
        self._stamp += 1
        node.stamp = self._stamp
        heappush(self._heap, (score.value, node.stamp, node))
        if score.valid_until != float("inf"):
            heappush(self._expiry, (score.valid_until, node.stamp, node))

    def _tidied(self, heap: list[Entry]) -> list[Entry]:
        """Without what is not valid, once that is more than half."""
        if len(heap) <= 2 * self._num + _SLACK:
            return heap
        valid = [entry for entry in heap if entry[1] == entry[2].stamp]
        heapify(valid)
        return valid
