"""Sessions under a KV budget, by the real engine over a tiny model and the native kernels."""

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.engine import Engine
from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.messages import AddSequence
from shoal.scheduler.return_cost import ReturnCosts
from shoal.scheduler.sampling_params import SamplingParams

BLOCK_SIZE = 4
BUDGET = 64  # tokens; the prompts and texts below are longer
LOSSY = ["attention_sink", "h2o"]
CHEAP_COPIES = ReturnCosts((1e-9,), (1e-9,), 1.0)
LONG = [(idx * idx + 5 * idx) % 97 + 3 for idx in range(100)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


@pytest.fixture
def make_engine(checkpoint: Path) -> Any:
    def make(**settings: Any) -> Engine:
        defaults = {"num_kv_blocks": 300, "max_num_batched_tokens": 64, "max_num_seqs": 8}
        config = EngineConfig(
            weights=str(checkpoint),
            kernels="native",
            block_size=BLOCK_SIZE,
            **defaults | settings,
        )
        return build_engine(config, lambda *_: None)[0]

    return make


def add(
    engine: Engine, seq_id: int, tokens: list[int], num_prompt: int = 0, **sampling: Any
) -> None:
    params = {"temperature": 0.0, "max_tokens": 90, "ignore_eos": True, **sampling}
    engine.add(AddSequence(seq_id, tokens, num_prompt or len(tokens), SamplingParams(**params)))


def run(engine: Engine) -> dict[int, list[int]]:
    """Step to the end: the output tokens by seq_id."""
    tokens: dict[int, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            assert output.token is not None
            tokens.setdefault(output.seq_id, []).append(output.token.token_id)
    return tokens


def alone(engine: Engine, tokens: list[int], **sampling: Any) -> list[int]:
    add(engine, 1, tokens, **sampling)
    return run(engine)[1]


@pytest.mark.parametrize("kv_policy", LOSSY)
def test_a_budget_that_is_never_full_changes_nothing(make_engine: Any, kv_policy: str) -> None:
    engine = make_engine()
    whole = alone(engine, LONG, kv_policy=kv_policy, kv_budget=len(LONG) + 90)
    assert whole == alone(engine, LONG)


def test_policies_differ_once_it_is_full(make_engine: Any) -> None:
    engine = make_engine(prefix_caching=False)
    texts = [alone(engine, LONG, kv_policy=policy, kv_budget=BUDGET) for policy in LOSSY]
    texts.append(alone(engine, LONG))
    assert len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("kv_policy", LOSSY)
def test_memory_stays_within_the_budget(make_engine: Any, kv_policy: str) -> None:
    engine = make_engine()
    num_free = engine.status.free_blocks
    add(engine, 1, LONG, max_tokens=150, kv_policy=kv_policy, kv_budget=BUDGET)
    held = []
    while engine.has_unfinished:
        engine.step()
        held.append(num_free - engine.status.free_blocks)
    assert max(held) == BUDGET // BLOCK_SIZE
    assert min(held[:-1]) >= BUDGET // BLOCK_SIZE - 2  # an eviction drops an eighth
    assert held[-1] == 0  # nothing is left in the prefix cache


@pytest.mark.parametrize("kv_policy", LOSSY)
@pytest.mark.parametrize("budget", [7, 64])
def test_company_and_the_size_of_chunks_change_no_token(
    make_engine: Any, kv_policy: str, budget: int
) -> None:
    options = {"kv_policy": kv_policy, "kv_budget": BUDGET}
    expected = alone(make_engine(), LONG, **options)
    engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=7)
    for seq_id in range(2, 5):
        add(engine, seq_id, LONG[seq_id : 20 * seq_id], max_tokens=30)
    add(engine, 1, LONG, **options)
    add(engine, 5, LONG[::-1], kv_policy="h2o", kv_budget=80, max_tokens=40)
    assert run(engine)[1] == expected


@pytest.mark.parametrize("kv_policy", LOSSY)
@pytest.mark.parametrize("num_known", [1, 13, 77])
def test_a_replay_goes_on_with_the_same_tokens(
    make_engine: Any, kv_policy: str, num_known: int
) -> None:
    engine = make_engine()
    options = {"kv_policy": kv_policy, "kv_budget": BUDGET}
    expected = alone(engine, LONG, **options)
    add(engine, 1, LONG + expected[:num_known], num_prompt=len(LONG), **options)
    assert run(engine)[1] == expected[num_known:]


@pytest.mark.parametrize("kv_policy", LOSSY)
@pytest.mark.parametrize("host_kv_mib", [0, 8])
def test_preemption_after_evictions_changes_no_token(
    make_engine: Any, kv_policy: str, host_kv_mib: int
) -> None:
    options = {"kv_policy": kv_policy, "kv_budget": BUDGET}
    expected = alone(make_engine(), LONG, **options)
    engine = make_engine(num_kv_blocks=48, max_model_len=192, host_kv_mib=host_kv_mib)
    host = engine._engine._scheduler.kv.host
    if host is not None:
        host.costs = CHEAP_COPIES
    add(engine, 0, LONG[:50], max_tokens=141)  # of 48 blocks it wants more than the other leaves
    add(engine, 1, LONG, **options)
    tokens: list[int] = []
    while not engine.status.num_preemptions:
        tokens += [output.token.token_id for output in engine.step() if output.seq_id == 1]
    assert len(LONG) + len(tokens) > 2 * BUDGET
    assert tokens + run(engine)[1] == expected
    assert (host is not None) == bool(host_kv_mib)
    if host is not None:  # a checkpoint came back, with what was evicted before
        assert host.num_restores > 0


@pytest.mark.parametrize("kv_policy", LOSSY)
def test_it_neither_finds_nor_leaves_cached_blocks(make_engine: Any, kv_policy: str) -> None:
    engine = make_engine()
    options = {"kv_policy": kv_policy, "kv_budget": BUDGET}
    alone(engine, LONG)  # leaves its prompt
    add(engine, 2, LONG, **options)
    (output,) = [output for output in _until_a_token(engine) if output.token]
    assert output.num_cached_tokens == 0
    run(engine)
    other = LONG[::-1]
    alone(engine, other, **options)
    add(engine, 3, other)
    (output,) = [output for output in _until_a_token(engine) if output.token]
    assert output.num_cached_tokens == 0


def _until_a_token(engine: Engine) -> list[Any]:
    while not (outputs := engine.step()):
        pass
    return outputs


def test_the_context_still_ends_at_true_positions(make_engine: Any) -> None:
    engine = make_engine(max_model_len=120)
    text = alone(engine, LONG, kv_policy="h2o", kv_budget=BUDGET)
    assert len(LONG) + len(text) == 120
