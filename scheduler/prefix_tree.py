"""The prefix cache: a radix tree of token blocks whose KV is already computed.

Keys are real tokens, compared block by block; nothing rests on a hash alone. Each salt has a root
of its own, so what one tenant cached cannot be seen, hit or timed by another.

Ownership: a block id that `insert` accepted belongs to the tree until `evict` hands it back. A
sequence that reads such blocks holds a lock on their path. Only unlocked leaves are evicted, from
their tails, so that what stays is always a usable prefix.
"""

from collections.abc import Callable, Sequence
from itertools import islice

from shoal.scheduler.eviction import EvictionPolicy, NodeUsage
from shoal.scheduler.eviction_candidates import EvictionCandidates
from shoal.scheduler.path_digests import path_digests, prompt_digest
from shoal.scheduler.prefix_nodes import (
    DemoteHook,
    EvictedRun,
    InsertResult,
    PrefixLock,
    PrefixMatch,
    PrefixNode,
    ancestors,
)

PADDING = 2**62  # no token: fills up a block of which only the beginning means anything
_MOST_BRANCHES = 64  # that are looked through for a block of which only the beginning is known


class PrefixTree:
    """See the module's text. Not thread-safe: owned by the engine thread."""

    def __init__(
        self,
        block_size: int,
        policy: EvictionPolicy,
        clock: Callable[[], float] | None = None,
        on_demote: DemoteHook | None = None,
    ) -> None:
        assert block_size > 0
        self.block_size = block_size
        self.policy = policy
        self.num_blocks = 0
        self.num_evicted = 0  # blocks, so far
        self.num_evictable = 0
        self._clock = clock
        self._on_demote = on_demote
        self._roots: dict[bytes, PrefixNode] = {}
        self._exact: dict[bytes, PrefixNode] = {}
        self._tick = 0
        self._version = 0
        self._candidates = EvictionCandidates(policy)

    def match(
        self, salt: bytes, token_ids: Sequence[int], max_tokens: int | None = None
    ) -> PrefixMatch:
        """The longest cached prefix within `max_tokens`, in full blocks. Changes nothing."""
        limit = len(token_ids) if max_tokens is None else min(max_tokens, len(token_ids))
        node = self._roots.get(salt)
        if node is None:
            return PrefixMatch([], 0, self._empty_root(salt), 0, self._version)
        block_ids: list[int] = []
        tokens = token_ids if isinstance(token_ids, list) else list(token_ids)
        node, taken, position = self._walk(node, tokens, limit, block_ids)
        return PrefixMatch(block_ids, position, node, taken, self._version)

    def block_after(self, match: PrefixMatch, token_ids: Sequence[int]) -> int | None:
        """A block that comes right after the match and begins with these tokens, at most a block
        full. Of many branches only the first ones are looked at."""
        assert match.version == self._version, "the tree changed since the match"
        node, wanted = match.node, tuple(token_ids)
        if match.num_node_blocks < len(node.block_ids):
            start = match.num_node_blocks * self.block_size
            begins = tuple(node.token_ids[start : start + len(wanted)]) == wanted
            return node.block_ids[match.num_node_blocks] if begins else None
        child = node.children.get(wanted + (PADDING,) * (self.block_size - len(wanted)))
        if child is not None or len(wanted) == self.block_size:
            return child.block_ids[0] if child is not None else None
        for key, child in islice(node.children.items(), _MOST_BRANCHES):
            if key[: len(wanted)] == wanted:
                return child.block_ids[0]
        return None

    def match_exact(self, salt: bytes, token_ids: Sequence[int]) -> PrefixMatch | None:
        """All full blocks of a whole prompt in one look-up, or None; tokens are compared."""
        size = self.block_size
        num_blocks = len(token_ids) // size
        prompt = list(token_ids[: num_blocks * size])
        digest = prompt_digest(salt, prompt)
        node = self._exact.get(digest)
        if node is None:
            return None
        taken = node.exact[digest]
        path = [node, *ancestors(node)]
        if path[-1].salt != salt:
            return None
        block_ids: list[int] = []
        tokens: list[int] = []
        for step in reversed(path):
            used = taken if step is node else len(step.block_ids)
            block_ids += step.block_ids[:used]
            tokens += step.token_ids[: used * size]
        if tokens != prompt:
            return None
        return PrefixMatch(block_ids, len(prompt), node, taken, self._version)

    def lock(self, match: PrefixMatch) -> PrefixLock:
        """Keep the matched path from eviction."""
        assert match.version == self._version, "the tree changed since the match"
        node = match.node
        if match.num_node_blocks < len(node.block_ids):
            node = self._split(node, match.num_node_blocks)
        if node.parent is None:  # of misses before the first insert, each match made a root
            node = self._roots.setdefault(node.salt, node)
        step: PrefixNode | None = node
        while step is not None:
            if step.num_locks == 0:
                self.num_evictable -= len(step.block_ids)
                self._candidates.drop(step)
            step.num_locks += 1
            step = step.parent
        return PrefixLock(node)

    def unlock(self, lock: PrefixLock) -> None:
        """Let the path be evicted again, once nobody else holds it."""
        assert not lock.released, "unlocked twice"
        lock.released = True
        now = self._now()
        step: PrefixNode | None = lock.node
        while step is not None:
            step.num_locks -= 1
            parent = step.parent
            if step.num_locks == 0:
                self.num_evictable += len(step.block_ids)
                self._candidates.add(step, now)
                self._forget_empty_root(step)
            step = parent

    def num_blocks_kept(self, lock: PrefixLock) -> int:
        """Blocks of a locked path that others have locked too."""
        path = [lock.node, *ancestors(lock.node)]
        return sum(len(step.block_ids) for step in path if step.num_locks > 1)

    def insert(
        self,
        salt: bytes,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        num_output_tokens: int | None = None,
    ) -> InsertResult:
        """Take over the computed full blocks of a sequence; a part-filled last block stays out.

        `block_ids` covers the path from its start; those read from the tree are known by their id
        and are neither taken again nor reported as duplicates. A finished sequence gives its
        `num_output_tokens`, once: that counts as one use of the whole path. While it still runs
        (its prompt becomes shareable after prefill) it gives None.
        """
        size = self.block_size
        num_blocks = min(len(token_ids) // size, len(block_ids))
        tokens = list(token_ids[: num_blocks * size])
        root = self._roots.get(salt) or self._empty_root(salt)
        if num_blocks:
            self._roots[salt] = root
        now = self._now()
        self._tick += 1
        path_block_ids: list[int] = []
        node, taken, position = self._walk(root, tokens, len(tokens), path_block_ids)
        if taken < len(node.block_ids):
            node = self._split(node, taken)
        pairs = zip(block_ids, path_block_ids, strict=False)
        duplicates = [ours for ours, theirs in pairs if ours != theirs]
        if len(path_block_ids) < num_blocks:
            new_block_ids = list(block_ids[len(path_block_ids) : num_blocks])
            node = self._append(node, tokens[position:], new_block_ids, now)
            path_block_ids += new_block_ids
        self._record_use(node, num_output_tokens, now)
        match = PrefixMatch(path_block_ids, len(tokens), node, len(node.block_ids), self._version)
        return InsertResult(duplicates, match)

    def index_prompt(self, match: PrefixMatch, salt: bytes, token_ids: Sequence[int]) -> None:
        """Let `match_exact` find the full blocks of a whole prompt, all covered by `match`."""
        assert match.version == self._version, "the tree changed since the match"
        tokens = list(token_ids[: len(token_ids) // self.block_size * self.block_size])
        assert len(tokens) == match.num_tokens
        if not tokens:
            return
        digest = prompt_digest(salt, tokens)
        match.node.exact[digest] = match.num_node_blocks
        self._exact[digest] = match.node

    def evict(self, num_blocks: int) -> list[int]:
        """Give up at most `num_blocks` blocks, worst first, and return their ids."""
        now = self._now()
        self._candidates.refresh(now)
        evicted: list[int] = []
        while len(evicted) < num_blocks and (node := self._candidates.worst()) is not None:
            self._take_tail(node, num_blocks - len(evicted), evicted, now)
        self.num_evicted += len(evicted)
        return evicted

    def block_ids(self) -> list[int]:
        """Every block that the tree holds."""
        found: list[int] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            found += node.block_ids
            stack.extend(node.children.values())
        return found

    def check_integrity(self) -> None:
        """Walk everything and compare with the counters; for tests and idle moments."""
        seen: set[int] = set()
        num_evictable = num_candidates = num_exact = 0
        for salt, root in self._roots.items():
            assert root.salt == salt
            assert root.parent is None
            assert not root.block_ids
            stack = [root]
            while stack:
                node = stack.pop()
                self._check_node(node)
                assert seen.isdisjoint(node.block_ids), "a block is in the tree twice"
                seen.update(node.block_ids)
                num_evictable += 0 if node.num_locks else len(node.block_ids)
                num_candidates += node.stamp != 0
                num_exact += len(node.exact)
                stack.extend(node.children.values())
        assert len(seen) == self.num_blocks
        assert num_evictable == self.num_evictable
        self._candidates.check_integrity(num_candidates)
        assert num_exact == len(self._exact)

    def _check_node(self, node: PrefixNode) -> None:
        size = self.block_size
        assert len(set(node.block_ids)) == len(node.block_ids)
        assert len(node.token_ids) == len(node.block_ids) * size
        assert node.num_locks >= sum(child.num_locks for child in node.children.values())
        for key, child in node.children.items():
            assert child.parent is node
            assert child.block_ids
            assert tuple(child.token_ids[:size]) == key
        if node.parent is None:
            assert node.children or node.num_locks, "an empty root was kept"
            return
        assert node.usage.num_blocks >= len(node.block_ids)
        assert len(node.path_keys) == (len(node.block_ids) if self.policy.keeps_history else 0)
        assert (node.stamp != 0) == (not node.children and node.num_locks == 0)
        for digest, taken in node.exact.items():
            assert self._exact[digest] is node
            assert 0 < taken <= len(node.block_ids)

    def _now(self) -> float:
        return float(self._tick) if self._clock is None else self._clock()

    def _empty_root(self, salt: bytes) -> PrefixNode:
        return PrefixNode(None, [], [], NodeUsage(0, 0, 0, 0.0, 0), salt=salt)

    def _walk(
        self, node: PrefixNode, token_ids: list[int], limit: int, block_ids: list[int]
    ) -> tuple[PrefixNode, int, int]:
        """Follow `token_ids` down; returns the last node, its matched blocks, matched tokens."""
        size = self.block_size
        position = 0
        taken = len(node.block_ids)
        while position + size <= limit:
            child = node.children.get(tuple(token_ids[position : position + size]))
            if child is None:
                break
            node = child
            end = position + len(node.token_ids)
            if end <= limit and token_ids[position:end] == node.token_ids:
                block_ids += node.block_ids
                taken = len(node.block_ids)
                position = end
                continue
            taken = self._count_common(node, token_ids, position, limit)
            block_ids += node.block_ids[:taken]
            position += taken * size
            break
        return node, taken, position

    def _count_common(
        self, node: PrefixNode, token_ids: list[int], position: int, limit: int
    ) -> int:
        size = self.block_size
        low, high = 1, min(len(node.block_ids), (limit - position) // size)
        while low < high:  # invariant: the first `low` blocks are common
            middle = (low + high + 1) // 2
            start, end = low * size, middle * size
            if token_ids[position + start : position + end] == node.token_ids[start:end]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        """Cut a run in two; the given node stays the lower part, so that locks stay right."""
        assert node.parent is not None
        assert 0 < num_blocks < len(node.block_ids)
        self._version += 1
        size = self.block_size
        cut = num_blocks * size
        parent = node.parent
        head = PrefixNode(
            parent,
            node.token_ids[:cut],
            node.block_ids[:num_blocks],
            node.usage.fork(num_blocks),
            node.path_keys[:num_blocks],
            num_locks=node.num_locks,
        )
        parent.children[tuple(head.token_ids[:size])] = head
        del node.token_ids[:cut], node.block_ids[:num_blocks], node.path_keys[:num_blocks]
        node.usage.depth += num_blocks
        node.parent = head
        head.children[tuple(node.token_ids[:size])] = node
        head.usage.num_branches = 1
        for digest, taken in list(node.exact.items()):
            del node.exact[digest]
            owner, count = (head, taken) if taken <= num_blocks else (node, taken - num_blocks)
            owner.exact[digest] = count
            self._exact[digest] = owner
        return head

    def _append(
        self, node: PrefixNode, tokens: list[int], block_ids: list[int], now: float
    ) -> PrefixNode:
        """Hang new blocks under `node`: one run for each history that its blocks bring along."""
        self._version += 1
        self.num_blocks += len(block_ids)
        if not self.policy.keeps_history:
            return self._add_run(node, tokens, block_ids, [], None, now)
        size = self.block_size
        keys = self._path_keys(node, tokens)
        histories = [self.policy.recall(key) for key in keys]
        start = 0
        for end in range(1, len(keys) + 1):
            if end < len(keys) - 1 and histories[end] is histories[start]:
                continue
            run = tokens[start * size : end * size]
            node = self._add_run(
                node, run, block_ids[start:end], keys[start:end], histories[start], now
            )
            start = end
        node.usage.is_tail = True
        return node

    def _add_run(
        self,
        parent: PrefixNode,
        tokens: list[int],
        block_ids: list[int],
        keys: list[int],
        history: NodeUsage | None,
        now: float,
    ) -> PrefixNode:
        count = len(block_ids)
        if history is None:
            usage = self._new_usage(parent, count, now)
        else:
            usage = history.fork(count)
            usage.depth = parent.usage.depth + len(parent.block_ids)
        node = PrefixNode(parent, tokens, block_ids, usage, keys)
        self._candidates.drop(parent)
        parent.children[tuple(tokens[: self.block_size])] = node
        self.num_evictable += count
        self._candidates.add(node, now)
        return node

    def _new_usage(self, parent: PrefixNode, num_blocks: int, now: float) -> NodeUsage:
        above = parent.usage
        above.num_branches += 1
        usage = NodeUsage(
            num_blocks, above.depth + len(parent.block_ids), above.turn, now, self._tick
        )
        if parent.parent is not None:
            usage.turn += above.num_uses > 0
            usage.parent_branches = above.num_branches
            usage.last_gap = above.last_gap
        return usage

    def _record_use(self, node: PrefixNode, num_output_tokens: int | None, now: float) -> None:
        path = [node, *ancestors(node)][:-1]
        growth = sum(len(step.block_ids) for step in path if step.usage.num_uses == 0)
        for step in reversed(path):
            usage = step.usage
            if num_output_tokens is not None:
                if usage.num_uses:
                    self.policy.on_hit(usage, now)
                    usage.last_gap = now - usage.last_used
                usage.num_uses += 1
                usage.last_growth = growth
                usage.last_output = num_output_tokens
            usage.last_used = now
            usage.last_tick = self._tick
            if num_output_tokens is not None:
                self.policy.on_use(usage, now)
        self._candidates.drop(node)
        self._candidates.add(node, now)

    def _path_keys(self, node: PrefixNode, tokens: list[int]) -> list[int]:
        """A cheap chained hash for each block, for statistics only: no KV is found by it."""
        size = self.block_size
        key = node.path_keys[-1] if node.path_keys else hash(node.salt)
        keys = []
        for start in range(0, len(tokens), size):
            key = hash((key, *tokens[start : start + size]))
            keys.append(key)
        return keys

    def _take_tail(self, node: PrefixNode, wanted: int, evicted: list[int], now: float) -> None:
        """Move up to `wanted` blocks from the end of an unlocked leaf to `evicted`."""
        self._version += 1
        keep = max(0, len(node.block_ids) - wanted)
        lost = node.block_ids[keep:]
        if self._on_demote is not None and (run := self._evicted_run(node, keep)):
            self._on_demote(run)
        if self.policy.keeps_history:
            for key in reversed(node.path_keys[keep:]):
                self.policy.on_evict(node.usage, key)
        else:
            node.usage.num_blocks -= len(lost)
        evicted += reversed(lost)
        self.num_blocks -= len(lost)
        self.num_evictable -= len(lost)
        self._forget_exact(node, keep)
        if keep == 0:
            self._remove(node, now)
        else:
            del (
                node.block_ids[keep:],
                node.path_keys[keep:],
                node.token_ids[keep * self.block_size :],
            )

    def _forget_exact(self, node: PrefixNode, keep: int) -> None:
        for digest in [digest for digest, taken in node.exact.items() if taken > keep]:
            del node.exact[digest]
            del self._exact[digest]

    def _remove(self, node: PrefixNode, now: float) -> None:
        parent = node.parent
        assert parent is not None
        self._candidates.drop(node)
        del parent.children[tuple(node.token_ids[: self.block_size])]
        self._candidates.add(parent, now)
        self._forget_empty_root(parent)

    def _forget_empty_root(self, node: PrefixNode) -> None:
        if node.parent is None and not node.children and not node.num_locks:
            del self._roots[node.salt]

    def _evicted_run(self, node: PrefixNode, keep: int) -> EvictedRun | None:
        """Of whole blocks of tokens."""
        path = list(reversed([node, *ancestors(node)]))
        tokens = [token for step in path for token in step.token_ids]
        start = len(tokens) - (len(node.block_ids) - keep) * self.block_size
        if tokens[-1] == PADDING:
            del tokens[-self.block_size :]
        lost = node.block_ids[keep : keep + (len(tokens) - start) // self.block_size]
        if not lost:
            return None
        digests = path_digests(path[0].salt, tokens, self.block_size)
        return EvictedRun(path[0].salt, start, tokens[start:], lost, digests[-len(lost) :])
