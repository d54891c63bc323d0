"""Carries out the scheduler's orders to move KV blocks."""

from collections.abc import Sequence

from shoal.backend.host_kv import HostKV
from shoal.backend.kv_disk import KVDisk
from shoal.scheduler.transfers import (
    BlockCopy,
    DeviceCopy,
    DiskLoad,
    DiskResult,
    DiskStore,
    Transfer,
)


class KVMover:
    """Owned by the engine thread. Everything but the disk's own work happens in ``carry_out``."""

    def __init__(self, host: HostKV, disk: KVDisk | None = None) -> None:
        self._host = host
        self._disk = disk
        self._loading: dict[bytes, int] = {}  # digest -> host block

    def carry_out(self, transfers: Sequence[Transfer]) -> None:
        """In order. Copies next to each other are made together."""
        copies: list[BlockCopy] = []
        for transfer in transfers:
            if isinstance(transfer, BlockCopy):
                copies.append(transfer)
                continue
            self._host.copy(copies)
            copies = []
            if isinstance(transfer, DeviceCopy):
                self._host.cache.copy_blocks([transfer])
            else:
                self._order(transfer)
        self._host.copy(copies)

    def take_results(self, wait_s: float = 0.0) -> list[DiskResult]:
        """What the disk has done since the last time; waits at most ``wait_s`` for the first."""
        if self._disk is None:
            return []
        results = []
        for outcome in self._disk.take_outcomes(wait_s):
            if outcome.loaded:
                host_block = self._loading.pop(outcome.digest)
                if outcome.payload is not None:
                    self._host.write(host_block, outcome.payload)
            results.append(
                DiskResult(outcome.digest, outcome.loaded, outcome.ok, outcome.disk_full)
            )
        return results

    def remove(self, digests: Sequence[bytes]) -> None:
        """Take blocks off the disk."""
        assert self._disk is not None or not digests
        for digest in digests:
            if self._disk is not None:
                self._disk.remove(digest)

    def _order(self, transfer: DiskStore | DiskLoad) -> None:
        assert self._disk is not None
        if isinstance(transfer, DiskLoad):
            self._loading[transfer.digest] = transfer.host_block
            self._disk.load(transfer.digest, transfer.token_ids)
            return
        if self._disk.takes_more:
            payload = self._host.read(transfer.host_block)
            self._disk.store(transfer.digest, transfer.token_ids, payload)
