"""How many KV blocks each group of layers gets, and how long a sequence they allow."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.scheduler.window_blocks import most_window_blocks

MIB = 2**20
# Of the free memory; the rest is for activations and the other processes.
USABLE_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class KVSize:
    """The first group's blocks are what limits; windowed groups have enough for any of its use."""

    num_blocks: int
    max_model_len: int  # tokens
    window_blocks: tuple[int, ...] = ()  # of the groups after the first

    @property
    def cache_blocks(self) -> tuple[int, ...]:
        """Blocks in memory: windowed groups have one more, which dropped entries name."""
        return (self.num_blocks, *(count + 1 for count in self.window_blocks))


@dataclass(frozen=True, slots=True)
class _Costs:
    """Memory of all groups as a function of the first group's number of blocks."""

    bytes_per_block: Sequence[int]  # by group
    most_window_blocks: tuple[int, ...]  # more are of no use; of the groups after the first

    def window_blocks(self, num_blocks: int) -> tuple[int, ...]:
        return tuple(min(num_blocks, most) for most in self.most_window_blocks)

    def num_bytes(self, num_blocks: int) -> int:
        size = KVSize(num_blocks, 0, self.window_blocks(num_blocks))
        return sum(map(int.__mul__, size.cache_blocks, self.bytes_per_block))

    def most_blocks(self, num_bytes: int) -> int:
        low, high = 0, num_bytes // self.bytes_per_block[0]
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_bytes(middle) <= num_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def mib(self, num_blocks: int) -> int:
        return -(-self.num_bytes(num_blocks) // MIB)


def size_kv_cache(
    config: EngineConfig,
    bytes_per_block: Sequence[int],
    model_max_len: int,
    available_bytes: int,
    windows: Sequence[int] = (),
) -> KVSize:
    """Settle the pools and the context length. Raises ConfigError with the largest that fits.

    ``bytes_per_block`` is of all groups, ``windows`` of those after the first.
    """
    costs = _Costs(
        bytes_per_block,
        tuple(
            most_window_blocks(
                window, config.block_size, config.max_num_seqs, config.max_num_batched_tokens
            )
            for window in windows
        ),
    )
    num_blocks = _num_blocks(config, costs, available_bytes)
    pool_len = num_blocks * config.block_size
    most = min(model_max_len, pool_len)
    wanted = config.max_model_len
    if wanted is None or wanted <= most:
        return KVSize(num_blocks, wanted or most, costs.window_blocks(num_blocks))
    if model_max_len <= pool_len:
        raise ConfigError(
            f"max_model_len {wanted} is beyond the model's context: set it to at most {most}."
        )
    context = f"to at most {model_max_len} (the model's context) and "
    raise ConfigError(
        f"max_model_len {wanted} does not fit in the KV pool: set it to at most {pool_len}, "
        f"or {context if wanted > model_max_len else ''}"
        f"{_larger_pool(config, min(wanted, model_max_len), costs)}."
    )


def _larger_pool(config: EngineConfig, num_tokens: int, costs: _Costs) -> str:
    """The setting that settled the pool, and the value that holds ``num_tokens``."""
    num_blocks = -(-num_tokens // config.block_size)
    if config.num_kv_blocks:
        return f"num_kv_blocks to at least {num_blocks}"
    return f"kv_cache_mib to at least {costs.mib(num_blocks)}"


def _num_blocks(config: EngineConfig, costs: _Costs, available_bytes: int) -> int:
    num_blocks = config.num_kv_blocks or costs.most_blocks(config.kv_cache_mib * MIB)
    usable = int(available_bytes * USABLE_FRACTION)
    if costs.num_bytes(num_blocks) > usable:
        name, most = (
            ("num_kv_blocks", costs.most_blocks(usable))
            if config.num_kv_blocks
            else ("kv_cache_mib", usable // MIB)
        )
        raise ConfigError(
            f"{name}: the KV cache would take {costs.num_bytes(num_blocks) // MIB} MiB and "
            f"{usable // MIB} MiB of memory can be used: set {name} to at most {most}."
        )
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_mib {config.kv_cache_mib} holds no two blocks: set it to at least "
            f"{costs.mib(2)}."
        )
    return num_blocks
