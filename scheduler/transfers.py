"""Orders to move KV blocks between the device, host memory and disk."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block, of all layers of a KV group, between the device and host memory."""

    to_device: bool
    group: int
    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """One block, of all layers of a KV group, to another one on the device."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class DiskStore:
    """Write a host block of the first group to disk. The block may be reused afterwards."""

    host_block: int
    digest: bytes  # of the whole path up to the block's end: its name
    token_ids: tuple[int, ...]  # the block's own


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """Read a block from disk into a host block; ``DiskResult`` says later how that went."""

    host_block: int
    digest: bytes
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiskResult:
    """A block is now in host memory (loaded), on disk (stored), or neither (not ok)."""

    digest: bytes
    loaded: bool
    ok: bool
    disk_full: bool = False  # why it is not stored


# Carried out in the order in which they were given, before the step's forward pass: a block's
# contents are read before the block goes to somebody else.
Transfer = BlockCopy | DeviceCopy | DiskStore | DiskLoad


def only_device_copies(transfers: Sequence[Transfer]) -> list[DeviceCopy]:
    """The orders of a scheduler without a host tier."""
    copies = [transfer for transfer in transfers if isinstance(transfer, DeviceCopy)]
    assert len(copies) == len(transfers)
    return copies
