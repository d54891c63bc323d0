import pytest

from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.kv_sizing import MIB, KVSize, size_kv_cache

BLOCK_BYTES = 64 * 1024


def size(available=2**40, model_max_len=2048, **settings):
    config = EngineConfig(weights="w", **settings)
    return size_kv_cache(config, [BLOCK_BYTES], model_max_len, available)


def test_the_pool_takes_kv_cache_mib():
    assert size(kv_cache_mib=100) == KVSize(num_blocks=1600, max_model_len=2048)


def test_num_kv_blocks_wins_over_kv_cache_mib():
    assert size(kv_cache_mib=100, num_kv_blocks=10) == KVSize(num_blocks=10, max_model_len=160)


def test_max_model_len_is_what_was_asked():
    assert size(max_model_len=512).max_model_len == 512


def test_beyond_the_model_names_the_largest_that_fits():
    with pytest.raises(ConfigError, match=r"max_model_len 4096 .* at most 2048\."):
        size(max_model_len=4096)


def test_beyond_the_model_and_the_pool_names_the_pool_first():
    with pytest.raises(ConfigError) as error:
        size(max_model_len=1_000_000, num_kv_blocks=2)
    assert str(error.value) == (
        "max_model_len 1000000 does not fit in the KV pool: set it to at most 32, or to at most "
        "2048 (the model's context) and num_kv_blocks to at least 128."
    )
    assert size(max_model_len=32, num_kv_blocks=2).max_model_len == 32
    assert size(max_model_len=2048, num_kv_blocks=128).max_model_len == 2048


def test_beyond_the_pool_names_the_setting_that_made_it():
    with pytest.raises(ConfigError, match=r"at most 160, or num_kv_blocks to at least 125\."):
        size(max_model_len=2000, num_kv_blocks=10)


def test_beyond_the_pool_names_both_ways_out():
    with pytest.raises(ConfigError, match=r"at most 256, or kv_cache_mib to at least 8\.") as error:
        size(max_model_len=2000, kv_cache_mib=1)
    largest = 256
    assert size(max_model_len=largest, kv_cache_mib=1).max_model_len == largest
    assert size(max_model_len=2000, kv_cache_mib=8).max_model_len == 2000
    assert "2000" in str(error.value)


def test_more_than_the_memory_names_the_largest_that_fits():
    with pytest.raises(ConfigError, match=r"set kv_cache_mib to at most 180\."):
        size(available=200 * MIB, kv_cache_mib=1000)
    assert size(available=200 * MIB, kv_cache_mib=180).num_blocks == 180 * 16
    with pytest.raises(ConfigError, match=r"set num_kv_blocks to at most 2880\."):
        size(available=200 * MIB, num_kv_blocks=3000)


def test_a_pool_without_two_blocks_names_the_smallest():
    config = EngineConfig(weights="w", kv_cache_mib=1)
    with pytest.raises(ConfigError, match=r"at least 4\."):
        size_kv_cache(config, [2 * MIB], 2048, 2**40)


HYBRID = {"bytes_per_block": [BLOCK_BYTES, 5 * BLOCK_BYTES], "windows": [33]}


def size_hybrid(**settings):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig(weights="w", **limits, **settings)
    return size_kv_cache(config, model_max_len=2**20, available_bytes=2**40, **HYBRID)


def test_windowed_groups_take_only_what_their_sequences_can_need():
    enough = 4 * (2 + 2) + 4  # 32 tokens and two cut blocks a sequence, and a step's tokens
    found = size_hybrid(kv_cache_mib=100)
    assert found.window_blocks == (enough,)
    assert found.cache_blocks == (found.num_blocks, enough + 1)
    assert found.num_blocks == 1600 - 5 * (enough + 1)
    assert found.max_model_len == 16 * found.num_blocks


def test_a_small_cache_gives_windowed_groups_as_many_blocks_as_the_first():
    assert size_hybrid(num_kv_blocks=10).window_blocks == (10,)
    found = size_hybrid(kv_cache_mib=4)  # 64 units: n + 5 * (n + 1)
    assert (found.num_blocks, found.window_blocks) == (9, (9,))
