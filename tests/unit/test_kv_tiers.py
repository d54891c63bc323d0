"""A tiny real model under pressure: the same text from checkpoints, host, disk and recompute."""

import json
from dataclasses import replace

import pytest
import torch
from builders import make_sampling, make_sequence
from tiny_checkpoint import write_tiny_checkpoint, write_tiny_windowed
from tiny_runs import BLOCK_SIZE, generate, make_kv_cache

from shoal.backend import engine_builder
from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.host_kv import HostKV
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_disk import KVDisk
from shoal.backend.kv_fingerprint import kv_fingerprint
from shoal.backend.messages import AddSequence
from shoal.backend.weights.loader import load_model
from shoal.scheduler.eviction import LruPolicy

DEAR, CHEAP = (1.0, 1e-3), (1e-6, 1e-3)  # a block's copy, a token's prefill
NUM_SEQUENCES = 9
SAMPLED = {"temperature": 1.0, "top_p": 0.9}
MODEL = b"m" * 32
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 8 * 4  # layers, keys and values, tokens, heads, numbers
SQUEEZED = {"num_blocks": 18, "max_model_len": 70, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, torch.float32)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = write_tiny_windowed(tmp_path_factory.mktemp("gemma"), 11)
    return load_model(folder, torch.float32)


def make_sequences(first_id=0, **sampling):
    """Distinct prompts of 6 to 39 tokens, with 24 tokens to come."""
    return [
        make_sequence(
            first_id + i, 6 + 3 * i, prompt_seed=7 * i, max_tokens=24, ignore_eos=True, **sampling
        )
        for i in range(NUM_SEQUENCES)
    ]


@pytest.fixture(scope="module", params=[{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def sampling(request):
    return request.param


@pytest.fixture(scope="module")
def unpressed(tiny, sampling):
    result = generate(tiny, make_sequences(**sampling), num_blocks=400)
    assert result.scheduler.num_preemptions == 0
    assert len({tuple(text) for text in result.texts.values()}) > NUM_SEQUENCES // 2
    return result.texts


def test_recompute_gives_the_same_text(tiny, sampling, unpressed):
    result = generate(tiny, make_sequences(**sampling), **SQUEEZED)
    assert result.scheduler.num_preemptions > 5
    assert result.texts == unpressed


def test_checkpoints_give_the_same_text(tiny, sampling, unpressed):
    result = generate(
        tiny, make_sequences(**sampling), host_blocks=100, return_costs=CHEAP, **SQUEEZED
    )
    host = result.scheduler.kv.host
    assert host.num_checkpoints == host.num_restores == result.scheduler.num_preemptions > 5
    assert host.pool.num_used == 0
    assert result.texts == unpressed


def test_a_host_too_small_for_all_checkpoints_gives_the_same_text(tiny, sampling, unpressed):
    result = generate(
        tiny, make_sequences(**sampling), host_blocks=14, return_costs=CHEAP, **SQUEEZED
    )
    assert 0 < result.scheduler.kv.host.num_checkpoints < result.scheduler.num_preemptions
    assert result.texts == unpressed


def test_where_copies_are_dear_it_computes_again(tiny, sampling, unpressed):
    result = generate(
        tiny, make_sequences(**sampling), host_blocks=100, return_costs=DEAR, **SQUEEZED
    )
    assert result.scheduler.num_preemptions > 5
    assert result.scheduler.kv.host.num_checkpoints == 0
    assert result.texts == unpressed


def test_cached_blocks_that_move_to_the_host_give_the_same_text(tiny, sampling, unpressed):
    result = generate(
        tiny,
        make_sequences(**sampling),
        host_blocks=100,
        return_costs=CHEAP,
        prefix_eviction=LruPolicy(),
        **SQUEEZED,
    )
    prefixes = result.scheduler.kv.host.prefixes
    assert result.scheduler.num_preemptions > 5
    assert prefixes.num_demoted > 10
    assert prefixes.num_restored > 10
    assert result.texts == unpressed


def test_ten_sequences_of_memory_for_forty(tiny):
    def sequences():
        return [
            make_sequence(i, 13 + i % 5, prompt_seed=3 * i, max_tokens=20, **SAMPLED)
            for i in range(40)
        ]

    alone = generate(tiny, sequences(), num_blocks=1000, max_num_seqs=1).texts
    ten = {"num_blocks": 10 * 10, "max_model_len": 40, "max_num_seqs": 40}
    for options in ({}, {"host_blocks": 400, "return_costs": CHEAP}):
        result = generate(tiny, sequences(), **ten, **options)
        assert result.scheduler.num_preemptions > 0
        assert result.texts == alone


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_one_and_a_half_sequences_of_memory_for_thirty_two(tiny, sampled):
    def sequences():
        return [
            make_sequence(i, 13 + i % 5, prompt_seed=3 * i, max_tokens=20, **sampled)
            for i in range(32)
        ]

    expected = generate(tiny, sequences(), num_blocks=1000, max_num_seqs=32)
    assert expected.scheduler.num_preemptions == 0
    tight = {"num_blocks": 15, "max_model_len": 40, "max_num_seqs": 32}  # one takes up to 10
    checkpoints = {"host_blocks": 400, "return_costs": CHEAP}
    for options, has_checkpoints in (({}, False), (checkpoints, True)):
        result = generate(tiny, sequences(), **tight, **options)
        assert result.scheduler.num_preemptions > 10
        host = result.scheduler.kv.host
        assert (host is not None and host.num_restores > 10) == has_checkpoints
        assert result.texts == expected.texts


def test_a_hybrid_model_is_checkpointed_group_by_group(hybrid, sampling):
    options = {"windows": [(11, 400)], "max_num_batched_tokens": 16, "max_num_seqs": 4}
    room = generate(hybrid, make_sequences(**sampling), num_blocks=400, **options)
    assert room.scheduler.num_preemptions == 0
    options |= {"num_blocks": 18, "windows": [(11, 18)], "max_model_len": 70}
    result = generate(
        hybrid, make_sequences(**sampling), host_blocks=60, return_costs=CHEAP, **options
    )
    host = result.scheduler.kv.host
    assert host.num_restores == host.num_checkpoints > 2
    assert result.texts == room.texts


def make_rounds(**sampling):
    return [make_sequences(100 * i, **sampling) for i in range(1, 3)]


def test_a_prefix_comes_back_from_host_and_from_disk(tiny, tmp_path, sampling):
    """The same prompts three times; meanwhile their blocks were pushed off the device."""
    expected = generate(
        tiny, make_sequences(**sampling), rounds=make_rounds(**sampling), num_blocks=400
    ).texts
    options = {"return_costs": CHEAP, "num_blocks": 24, "max_model_len": 70, "max_num_seqs": 2}
    rounds = make_rounds(**sampling)
    from_host = generate(
        tiny,
        make_sequences(**sampling),
        rounds=rounds,
        host_blocks=300,
        prefix_eviction=LruPolicy(),
        **options,
    )
    assert from_host.texts == expected
    num_from_host = sum(sequence.num_cached_tokens for sequence in rounds[1])
    assert num_from_host >= sum((s.num_prompt_tokens - 1) // 4 * 4 for s in rounds[1]) * 0.9

    rounds = make_rounds(**sampling)
    disk = KVDisk(tmp_path / "kv", MODEL, BLOCK_BYTES)
    from_disk = generate(
        tiny,
        make_sequences(**sampling),
        rounds=rounds,
        host_blocks=24,
        disk_blocks=1000,
        disk=disk,
        prefix_eviction=LruPolicy(),
        **options,
    )
    disk.close()
    assert from_disk.scheduler.kv.host.prefixes.num_on_disk > 50
    assert from_disk.texts == expected
    assert sum(sequence.num_cached_tokens for sequence in rounds[1]) > num_from_host // 2


def damage_all(folder):
    for path in folder.rglob("*.kv"):
        contents = bytearray(path.read_bytes())
        contents[len(contents) // 2] ^= 255
        path.write_bytes(contents)


@pytest.mark.parametrize("change", ["nothing", "contents", "model"])
def test_after_a_restart_the_disk_serves_what_is_whole_and_of_this_model(tiny, tmp_path, change):
    expected = generate(tiny, make_sequences(**SAMPLED), num_blocks=400).texts
    folder = tmp_path / "kv"

    def run(fingerprint):
        disk = KVDisk(folder, fingerprint, BLOCK_BYTES)
        sequences = make_sequences(**SAMPLED)
        result = generate(
            tiny,
            sequences,
            return_costs=CHEAP,
            num_blocks=24,
            max_model_len=70,
            max_num_seqs=2,
            host_blocks=24,
            disk_blocks=1000,
            disk_digests=disk.digests(),
            disk=disk,
            prefix_eviction=LruPolicy(),
        )
        disk.close()
        assert result.texts == expected
        return sum(sequence.num_cached_tokens for sequence in sequences)

    assert run(MODEL) == 0
    if change == "contents":
        damage_all(folder)
    num_cached = run(b"o" * 32 if change == "model" else MODEL)
    assert num_cached > 30 if change == "nothing" else num_cached == 0


def engine_config(folder, **settings):
    return EngineConfig(
        weights=str(folder),
        dtype="float32",
        kernels="reference",
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_threads=1,
        **settings,
    )


def run_engine(config, num_requests=8):
    engine, _ = build_engine(config, lambda phase, done, total: None)
    for i in range(num_requests):
        prompt = [10 + (i * 31 + j) % 100 for j in range(20 + i)]
        engine.add(AddSequence(i, prompt, len(prompt), make_sampling(max_tokens=30, **SAMPLED)))
    outputs = {i: [] for i in range(num_requests)}
    for _ in range(3000):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            assert output.error is None
            outputs[output.seq_id].append(output.token.token_id)
    return outputs, engine.status


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("engine") / "tiny", head_dim=128)


def test_the_engine_builds_the_tiers_and_logs_its_choices(checkpoint, tmp_path):
    plenty, status = run_engine(engine_config(checkpoint, num_kv_blocks=500))
    assert status.num_preemptions == 0
    log = tmp_path / "steps.jsonl"
    settings = {"num_kv_blocks": 26, "host_kv_mib": 1, "prefix_caching": False}
    squeezed, status = run_engine(engine_config(checkpoint, step_log=str(log), **settings))
    assert squeezed == plenty
    assert status.num_preemptions > 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    preemptions = [item for line in lines for item in line["preemptions"]]
    restored = [item for line in lines for item in line["restored"]]
    assert len(preemptions) == status.num_preemptions
    for item in preemptions:
        cheaper = "checkpoint" if item["copy_ms"] < item["recompute_ms"] else "recompute"
        assert item["way"] == cheaper
    ways = [item["way"] for item in preemptions]
    assert len(restored) == ways.count("checkpoint") == status.memory.num_restores
    assert [line for line in lines if line["preempted"]]
    assert status.memory.host_blocks_total > 50


def test_the_engine_writes_to_disk_what_the_host_has_no_room_for(checkpoint, tmp_path):
    plenty, _ = run_engine(engine_config(checkpoint, num_kv_blocks=500), num_requests=12)
    settings = {"num_kv_blocks": 26, "host_kv_mib": 1, "kv_disk_dir": str(tmp_path / "kv")}
    squeezed, status = run_engine(engine_config(checkpoint, **settings), num_requests=12)
    assert squeezed == plenty
    assert status.memory.num_demoted_blocks > status.memory.host_blocks_total
    assert status.memory.disk_blocks > 0


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_an_engines_keys_come_back_in_their_panels(checkpoint, native, monkeypatch, quantization):
    if not native.has_bf16:
        pytest.skip("panels are for bfloat16")
    made = []

    def make_cache(*args):
        made.append(PagedKVCache(*args))
        return made[-1]

    monkeypatch.setattr(engine_builder, "PagedKVCache", make_cache)

    def run(**settings):
        config = replace(
            engine_config(checkpoint, **settings),
            dtype="bfloat16",
            kernels="native",
            block_size=16,
            quantization=quantization,
        )
        return run_engine(config)

    plenty, status = run(num_kv_blocks=100)
    assert status.num_preemptions == 0
    squeezed, status = run(num_kv_blocks=9, host_kv_mib=1, prefix_caching=False)
    assert status.num_preemptions > 0
    assert squeezed == plenty
    assert [cache.keys_in_panels for cache in made] == [True, True]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host_kv_mib": 2**23}, "host_kv_mib .* at most"),
        ({"kv_disk_dir": "/dev/null/kv", "host_kv_mib": 1}, "kv_disk_dir"),
    ],
)
def test_what_cannot_be_had_is_named(checkpoint, settings, named):
    with pytest.raises(ConfigError, match=named):
        build_engine(engine_config(checkpoint, num_kv_blocks=64, **settings), lambda *_: None)


def test_the_fingerprint_changes_with_all_that_the_bits_depend_on(tiny, tmp_path):
    weights = write_tiny_checkpoint(tmp_path / "a")
    other = write_tiny_checkpoint(tmp_path / "b", num_hidden_layers=3)

    def fingerprint(
        path=weights, model=tiny.config, size=16, dtype=torch.float32, panels=False, by="native"
    ):
        return kv_fingerprint(path, model, size, dtype, panels, by)

    other_model = load_model(other, torch.float32).config
    values = {
        fingerprint(),
        fingerprint(other),
        fingerprint(model=other_model),
        fingerprint(size=32),
        fingerprint(dtype=torch.bfloat16),
        fingerprint(dtype=torch.bfloat16, panels=True),
        fingerprint(by="reference"),
    }
    assert len(values) == 7
    assert fingerprint() == fingerprint()
    file = weights / "model.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    before = fingerprint()
    file.write_bytes(contents)
    assert fingerprint() != before


def test_a_block_of_the_host_is_as_large_as_the_devices(tiny):
    scheduler = generate(tiny, [make_sequence(0, 5)], num_blocks=20).scheduler
    kv = make_kv_cache(tiny.config.kv_layout, scheduler)
    assert HostKV(kv, [3]).block_bytes(0) * kv.num_blocks[0] == kv.num_bytes
