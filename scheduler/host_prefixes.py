"""Prefix blocks that left the device: in host memory, then perhaps on disk, until asked for."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from shoal.scheduler.path_digests import path_digests
from shoal.scheduler.prefix_nodes import EvictedRun
from shoal.scheduler.transfers import BlockCopy, DiskLoad, DiskResult, DiskStore, Transfer

MAX_DISK_WAIT_S = 1.0
REGROW_AFTER_S = 30.0  # after the disk was full


class HostBlocks(Protocol):
    """Where the host blocks come from."""

    @property
    def num_total(self) -> int: ...

    def allocate_prefix_block(self) -> int | None: ...

    def free_prefix_block(self, host_block: int) -> None: ...


@dataclass(slots=True, eq=False)
class HostPrefix:
    """One block in host memory. It stays while somebody holds it: the disk that loads it, or a
    sequence that is to read it."""

    digest: bytes
    token_ids: tuple[int, ...]
    host_block: int
    is_loading: bool = False  # not yet to be read
    num_holds: int = 0


class DiskIndex:
    """Which blocks are on disk, least recently used first: at most ``max_blocks``.

    Fewer where others have filled the disk: then the oldest go, one for each block that did not
    fit, and after a while the index tries to grow again, block by block.
    """

    def __init__(
        self,
        max_blocks: int,
        digests: Sequence[bytes] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_blocks = max_blocks
        self._digests: OrderedDict[bytes, None] = OrderedDict.fromkeys(digests[-max_blocks:])
        self._clock = clock
        self._limit = max_blocks
        self._full_at = 0.0

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def touch(self, digest: bytes) -> None:
        self._digests.move_to_end(digest)

    def add(self, digest: bytes) -> list[bytes]:
        """Count a block in; returns those that must go for it."""
        self._digests[digest] = None
        if self._limit < self.max_blocks and self._clock() > self._full_at + REGROW_AFTER_S:
            self._limit += 1
        return [self._digests.popitem(last=False)[0] for _ in range(len(self) - self._limit)]

    def make_room(self) -> list[bytes]:
        """The disk took no more; returns what must go so that the next block finds room."""
        self._full_at = self._clock()
        gone = [self._digests.popitem(last=False)[0]] if self._digests else []
        self._limit = max(1, len(self))
        return gone

    def discard(self, digest: bytes) -> None:
        self._digests.pop(digest, None)


class HostPrefixes:
    """The tier below the prefix tree. Blocks are found by the salted digest of their whole path,
    and their own tokens are compared.

    A block that goes back to the device stays here as well, so that its next eviction costs no
    copy. The least recently used go first: to disk where there is one, else away.
    """

    def __init__(
        self,
        block_size: int,
        blocks: HostBlocks,
        emit: Callable[[Transfer], None],
        disk: DiskIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_demoted = 0  # blocks, in all
        self.num_restored = 0
        self.disk = disk
        self._block_size = block_size
        self._blocks = blocks
        self._emit = emit
        self._entries: OrderedDict[bytes, HostPrefix] = OrderedDict()
        self._num_loading = 0
        self._num_held = 0
        self._clock = clock
        self._digests: dict[int, list[bytes]] = {}  # by seq_id, while it waits
        self._asked_at: dict[int, float] = {}  # by seq_id: when the disk was asked for it
        self._held: dict[int, dict[bytes, HostPrefix]] = {}  # by seq_id and digest
        self._has_all: set[int] = set()  # seq_ids for which nothing more can be ordered

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_on_disk(self) -> int:
        return 0 if self.disk is None else len(self.disk)

    @property
    def num_loading(self) -> int:
        """Blocks on their way from disk."""
        return self._num_loading

    @property
    def num_evictable(self) -> int:
        return len(self._entries) - self._num_held

    def demote(self, run: EvictedRun) -> None:
        """Copy blocks that the tree gives up. Their last come first: a prefix outlives its end."""
        size = self._block_size
        for idx in reversed(range(len(run.block_ids))):
            digest = run.path_digests[idx]
            if digest in self._entries:
                self._entries.move_to_end(digest)
                continue
            host_block = self._take_block()
            if host_block is None:
                return
            tokens = tuple(run.token_ids[idx * size : (idx + 1) * size])
            self._entries[digest] = HostPrefix(digest, tokens, host_block)
            self._emit(BlockCopy(False, 0, run.block_ids[idx], host_block))
            self.num_demoted += 1

    def match(
        self, seq_id: int, salt: bytes, token_ids: Sequence[int], start: int, max_tokens: int
    ) -> list[HostPrefix]:
        """The blocks in host memory that follow the path's first ``start`` blocks, in order."""
        if not self._entries:
            return []
        found = []
        for idx, digest in self._path(seq_id, salt, token_ids, start, max_tokens):
            entry = self._entries.get(digest)
            if entry is None or entry.is_loading or not self._is_same(entry, token_ids, idx):
                break
            found.append(entry)
        return found

    def must_wait(
        self, seq_id: int, salt: bytes, token_ids: Sequence[int], start: int, max_tokens: int
    ) -> bool:
        """Whether blocks that follow the path's first ``start`` blocks are on their way from disk.

        They are ordered once, as far as the host has room; and none waits for a disk that takes
        more than ``MAX_DISK_WAIT_S``.
        """
        if self.disk is None or not (len(self.disk) or self._num_loading):
            return False
        now = self._clock()
        if seq_id not in self._has_all and self.load(seq_id, salt, token_ids, start, max_tokens):
            self._has_all.add(seq_id)
        if now > self._asked_at.setdefault(seq_id, now) + MAX_DISK_WAIT_S:
            return False
        return self.is_loading(seq_id, salt, token_ids, start, max_tokens)

    def load(
        self, seq_id: int, salt: bytes, token_ids: Sequence[int], start: int, max_tokens: int
    ) -> bool:
        """Order from disk what follows the path's first ``start`` blocks, those on the host aside.

        They are read while other sequences run; ``is_loading`` says whether to wait for them. All
        are held until ``forget_sequence``. Returns whether the host had room for them.
        """
        if self.disk is None or not len(self.disk):
            return True
        for idx, digest in self._path(seq_id, salt, token_ids, start, max_tokens):
            if digest in self._entries:
                self._hold(seq_id, self._entries[digest])
                continue
            if digest not in self.disk:
                return True
            has_room = 2 * self._num_held < self._blocks.num_total  # half is for what moves down
            host_block = self._take_block() if has_room else None
            if host_block is None:
                return False
            self.disk.touch(digest)
            size = self._block_size
            tokens = tuple(token_ids[idx * size : (idx + 1) * size])
            entry = HostPrefix(digest, tokens, host_block, is_loading=True, num_holds=1)
            self._entries[digest] = entry
            self._num_loading += 1
            self._num_held += 1
            self._hold(seq_id, entry)
            self._emit(DiskLoad(host_block, digest, tokens))
        return True

    def is_loading(
        self, seq_id: int, salt: bytes, token_ids: Sequence[int], start: int, max_tokens: int
    ) -> bool:
        """Whether a block that follows the path's first ``start`` blocks is on its way."""
        if not self._num_loading:
            return False
        for _, digest in self._path(seq_id, salt, token_ids, start, max_tokens):
            entry = self._entries.get(digest)
            if entry is None or entry.is_loading:
                return entry is not None
        return False

    def hold(self, seq_id: int, found: Sequence[HostPrefix]) -> None:
        """Keep blocks that were found until ``forget_sequence``."""
        for entry in found:
            self._hold(seq_id, entry)

    def touch(self, used: Sequence[HostPrefix]) -> None:
        """They went to the device. The first of the path becomes the last to be evicted."""
        self.num_restored += len(used)
        for entry in reversed(used):
            self._entries.move_to_end(entry.digest)

    def forget_sequence(self, seq_id: int) -> None:
        """It runs now, or is finished."""
        self._digests.pop(seq_id, None)
        self._asked_at.pop(seq_id, None)
        self._has_all.discard(seq_id)
        for entry in self._held.pop(seq_id, {}).values():
            self._let_go(entry)

    def take_result(self, result: DiskResult) -> list[bytes]:
        """A load or a store has ended; returns the digests of files to remove."""
        if self.disk is None:
            return []
        if not result.loaded:
            if result.disk_full:
                return self.disk.make_room()
            return self.disk.add(result.digest) if result.ok else []
        entry = self._entries[result.digest]
        entry.is_loading = False
        self._num_loading -= 1
        self._let_go(entry)
        if not result.ok:
            self.disk.discard(result.digest)
            self._forget_holders(entry)
            self._drop(entry)
        return []

    def evict(self, num_blocks: int) -> None:
        """Free at most ``num_blocks`` that nobody holds, least recently used first."""
        evictable = (entry for entry in self._entries.values() if not entry.num_holds)
        for entry in list(islice(evictable, num_blocks)):
            if self.disk is not None and entry.digest not in self.disk:
                self._emit(DiskStore(entry.host_block, entry.digest, entry.token_ids))
            self._drop(entry)

    def host_blocks(self) -> list[int]:
        """Every block that is in use here."""
        return [entry.host_block for entry in self._entries.values()]

    def check_integrity(self) -> None:
        assert self._num_loading == sum(entry.is_loading for entry in self._entries.values())
        holds = Counter(digest for held in self._held.values() for digest in held)
        for entry in self._entries.values():
            assert entry.num_holds == entry.is_loading + holds.pop(entry.digest, 0)
        assert not holds, "a block that is held is gone"
        assert self._num_held == sum(entry.num_holds > 0 for entry in self._entries.values())
        assert all(digest == entry.digest for digest, entry in self._entries.items())
        assert all(len(e.token_ids) == self._block_size for e in self._entries.values())
        assert self.disk is None or len(self.disk) <= self.disk.max_blocks

    def _take_block(self) -> int | None:
        host_block = self._blocks.allocate_prefix_block()
        if host_block is None and self.num_evictable:
            self.evict(1)
            host_block = self._blocks.allocate_prefix_block()
        return host_block

    def _hold(self, seq_id: int, entry: HostPrefix) -> None:
        held = self._held.setdefault(seq_id, {})
        if entry.digest not in held:
            held[entry.digest] = entry
            self._num_held += entry.num_holds == 0
            entry.num_holds += 1

    def _let_go(self, entry: HostPrefix) -> None:
        entry.num_holds -= 1
        self._num_held -= entry.num_holds == 0

    def _forget_holders(self, entry: HostPrefix) -> None:
        """Nobody gets a block that could not be loaded."""
        for held in self._held.values():
            if held.pop(entry.digest, None) is not None:
                self._let_go(entry)

    def _drop(self, entry: HostPrefix) -> None:
        del self._entries[entry.digest]
        self._blocks.free_prefix_block(entry.host_block)

    def _is_same(self, entry: HostPrefix, token_ids: Sequence[int], idx: int) -> bool:
        size = self._block_size
        return entry.token_ids == tuple(token_ids[idx * size : (idx + 1) * size])

    def _path(
        self, seq_id: int, salt: bytes, token_ids: Sequence[int], start: int, max_tokens: int
    ) -> list[tuple[int, bytes]]:
        """Index and digest of the path's full blocks from ``start`` on."""
        num_blocks = max_tokens // self._block_size
        digests = self._digests.get(seq_id, [])
        if len(digests) != num_blocks:
            tokens = token_ids[: num_blocks * self._block_size]
            digests = self._digests[seq_id] = path_digests(salt, tokens, self._block_size)
        return list(enumerate(digests))[start:]
