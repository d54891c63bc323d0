"""How many KV blocks there are, and how long a sequence they allow."""

from dataclasses import dataclass

from shoal.backend.engine_config import ConfigError, EngineConfig

MIB = 2**20
# Of the free memory; the rest is for activations and the other processes.
USABLE_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class KVSize:
    num_blocks: int
    max_model_len: int  # tokens


def size_kv_cache(
    config: EngineConfig, bytes_per_block: int, model_max_len: int, available_bytes: int
) -> KVSize:
    """Settle the pool and the context length. Raises ConfigError with the largest that fits."""
    num_blocks = _num_blocks(config, bytes_per_block, available_bytes)
    pool_len = num_blocks * config.block_size
    most = min(model_max_len, pool_len)
    wanted = config.max_model_len
    if wanted is None or wanted <= most:
        return KVSize(num_blocks, wanted or most)
    if model_max_len <= pool_len:
        raise ConfigError(
            f"max_model_len {wanted} is beyond the model's context: set it to at most {most}."
        )
    context = f"to at most {model_max_len} (the model's context) and "
    raise ConfigError(
        f"max_model_len {wanted} does not fit in the KV pool: set it to at most {pool_len}, "
        f"or {context if wanted > model_max_len else ''}"
        f"{_larger_pool(config, min(wanted, model_max_len), bytes_per_block)}."
    )


def _larger_pool(config: EngineConfig, num_tokens: int, bytes_per_block: int) -> str:
    """The setting that settled the pool, and the value that holds ``num_tokens``."""
    if config.num_kv_blocks:
        return f"num_kv_blocks to at least {-(-num_tokens // config.block_size)}"
    return f"kv_cache_mib to at least {_mib_for(num_tokens, config.block_size, bytes_per_block)}"


def _num_blocks(config: EngineConfig, bytes_per_block: int, available_bytes: int) -> int:
    wanted_bytes = config.kv_cache_mib * MIB
    num_blocks = config.num_kv_blocks or wanted_bytes // bytes_per_block
    usable = int(available_bytes * USABLE_FRACTION)
    if num_blocks * bytes_per_block > usable:
        name, most = (
            ("num_kv_blocks", usable // bytes_per_block)
            if config.num_kv_blocks
            else ("kv_cache_mib", usable // MIB)
        )
        raise ConfigError(
            f"{name}: the KV cache would take {num_blocks * bytes_per_block // MIB} MiB and "
            f"{usable // MIB} MiB of memory can be used: set {name} to at most {most}."
        )
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_mib {config.kv_cache_mib} holds no two blocks: set it to at least "
            f"{_mib_for(2 * config.block_size, config.block_size, bytes_per_block)}."
        )
    return num_blocks


def _mib_for(num_tokens: int, block_size: int, bytes_per_block: int) -> int:
    num_blocks = -(-num_tokens // block_size)
    return -(-num_blocks * bytes_per_block // MIB)
