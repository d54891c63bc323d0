"""Builds the tiers below the device: host memory for KV blocks and, where wanted, a disk folder."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.backend.cost_probe import measure_return_costs
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.host_kv import HostKV
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_disk import DiskInUse, KVDisk
from shoal.backend.kv_fingerprint import kv_fingerprint
from shoal.backend.kv_mover import KVMover
from shoal.backend.machine import available_memory
from shoal.backend.model_runner import ModelRunner
from shoal.backend.models.any_config import ServedConfig
from shoal.backend.weights.catalogue import resolve_weights
from shoal.scheduler.host_prefixes import DiskIndex
from shoal.scheduler.host_tier import HostTier

MIB = 2**20
AUTO_BESIDE_DISK_MIB = 256  # on a CPU: blocks pass through it on their way to and from disk
USABLE_FRACTION = 0.5  # of the free host memory; on a GPU's host by default half of that
CPU = torch.device("cpu")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVTiers:
    """The scheduler's books, and who carries out its orders."""

    host: HostTier
    mover: KVMover
    host_kv_bytes: int  # taken as blocks are first written


def build_kv_tiers(
    config: EngineConfig,
    model: ServedConfig,
    cache: PagedKVCache,
    runner: ModelRunner,
    computed_by: str,
) -> KVTiers | None:
    """Measure prices and take the memory; None where no host memory is wanted.

    ``runner`` runs over blocks that nobody holds yet; ``computed_by`` names all that the bits of
    keys and values depend on, beside the model. Raises ConfigError.
    """
    num_bytes = _host_bytes(config, cache)
    if num_bytes == 0:
        return None
    num_blocks = _host_blocks(num_bytes, cache)
    host_kv = HostKV(cache, num_blocks)
    costs = measure_return_costs(runner, cache, host_kv, num_blocks)
    disk = None
    if config.kv_disk_dir is not None and tier_keeps_prefixes(cache):
        fingerprint = kv_fingerprint(
            resolve_weights(config.weights),
            model,
            config.block_size,
            cache.keys(0).dtype,
            cache.keys_in_panels,
            f"{computed_by} {config.quantization}",
        )
        disk = _open_disk(Path(config.kv_disk_dir), fingerprint, host_kv.block_bytes(0))
    index = None
    if disk is not None:
        max_blocks = max(1, config.kv_disk_mib * MIB // disk.file_bytes(config.block_size))
        index = DiskIndex(max_blocks, disk.keep_newest(max_blocks))
    tier = HostTier(num_blocks, config.block_size, costs, tier_keeps_prefixes(cache), index)
    logger.info(
        "host memory for %d KV blocks; a block is copied out in %.3f ms and in in %.3f ms, "
        "a token computed in %.3f ms",
        num_blocks[0],
        1000 * sum(costs.save_s),
        1000 * sum(costs.restore_s),
        1000 * costs.prefill_s,
    )
    host_kv_bytes = sum(
        count * host_kv.block_bytes(group) for group, count in enumerate(num_blocks)
    )
    return KVTiers(tier, KVMover(host_kv, disk), host_kv_bytes)


def _host_bytes(config: EngineConfig, cache: PagedKVCache) -> int:
    usable = int(available_memory(CPU) * USABLE_FRACTION)
    if config.host_kv_mib is not None:
        num_bytes = config.host_kv_mib * MIB
        if num_bytes > usable:
            raise ConfigError(
                f"host_kv_mib {config.host_kv_mib}: {usable // MIB} MiB of memory can be used: "
                f"set it to at most {usable // MIB}."
            )
        return num_bytes
    if cache.device.type == "cuda":
        return min(cache.num_bytes, usable // 2)
    return min(AUTO_BESIDE_DISK_MIB * MIB, usable) if config.kv_disk_dir else 0


def _host_blocks(num_bytes: int, cache: PagedKVCache) -> tuple[int, ...]:
    """Blocks of each group, in the proportion of the device's pools."""
    num_blocks = tuple(num_bytes * count // cache.num_bytes for count in cache.num_blocks)
    if min(num_blocks) < 1:
        fewest = -(-cache.num_bytes // (min(cache.num_blocks) * MIB))
        raise ConfigError(f"host_kv_mib holds no block: set it to at least {fewest}, or to 0.")
    return num_blocks


def tier_keeps_prefixes(cache: PagedKVCache) -> bool:
    """Of a windowed group the prefix tree has only what lies beside its own blocks: there a prefix
    that left the device is of no use."""
    return len(cache.num_blocks) == 1


def _open_disk(folder: Path, fingerprint: bytes, payload_bytes: int) -> KVDisk | None:
    try:
        return KVDisk(folder, fingerprint, payload_bytes)
    except DiskInUse:
        logger.warning("kv_disk_dir is another worker's at present: this one goes without a disk")
        return None
