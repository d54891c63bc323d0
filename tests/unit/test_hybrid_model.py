"""A model of sliding and full layers through scheduler, prefix cache and paged caches."""

from collections.abc import Callable

import pytest
import torch
from builders import make_scheduler, make_sequence
from tiny_checkpoint import write_tiny_checkpoint
from tiny_runs import BLOCK_SIZE, CPU, make_kv_cache

from shoal.backend.model_runner import ModelRunner
from shoal.backend.weights.loader import load_model
from shoal.scheduler.eviction import LruPolicy
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.window_blocks import most_window_blocks

WINDOW = 11
BUDGET = 16
ENOUGH = most_window_blocks(WINDOW, BLOCK_SIZE, 4, BUDGET)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = write_tiny_checkpoint(
        tmp_path_factory.mktemp("gemma"),
        architectures=["Gemma3ForCausalLM"],
        head_dim=8,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
    )
    return load_model(folder, torch.float32)


class Recorder:
    """The model; keeps the logits of its last step."""

    def __init__(self, model) -> None:
        self._model = model
        self.logits = torch.empty(0)

    def forward(self, batch, kv):
        self.logits = self._model.forward(batch, kv)
        return self.logits


def logits_of(
    loaded, scheduler: Scheduler, rounds: list[list[Sequence]]
) -> dict[tuple[int, int], torch.Tensor]:
    """Logits by seq_id and output index; a round starts when the one before has ended.

    Memory starts as NaN, holes included: whoever reads what nobody wrote is found out.
    """
    kv = make_kv_cache(loaded.config.kv_layout, scheduler, fill=float("nan"))
    model = Recorder(loaded.model)
    runner = ModelRunner(model, kv, CPU)
    found = {}
    for sequences in rounds:
        for sequence in sequences:
            scheduler.add(sequence)
        while scheduler.has_unfinished:
            output = scheduler.schedule()
            result = runner.run(output)
            assert not result.failed
            sampling = [item.sequence for item in output.scheduled if item.samples]
            for sequence, row in zip(sampling, model.logits, strict=True):
                found[sequence.seq_id, sequence.num_output_tokens] = row
            scheduler.update_from_output(output, result.sampled)
            scheduler.check_integrity()
    return found


def make_rounds() -> list[list[Sequence]]:
    """Long texts that share prefixes of several lengths, within a round and with earlier ones."""
    common = make_sequence(0, 90).token_ids
    rounds = []
    for first_id in (0, 4):
        sequences = []
        for seq_id in range(first_id, first_id + 4):
            sequence = make_sequence(seq_id, 40 + 13 * seq_id, max_tokens=30, temperature=0.0)
            num_common = 20 * (seq_id % 4) + 9
            sequence.token_ids[:num_common] = common[:num_common]
            sequence.token_ids[num_common + 1 :: 3] = [seq_id + 3] * len(
                sequence.token_ids[num_common + 1 :: 3]
            )
            sequences.append(sequence)
        rounds.append(sequences)
    rounds.append([make_sequence(8, 91, max_tokens=10, temperature=0.0)])
    return rounds


def num_cached(rounds: list[list[Sequence]]) -> int:
    return sum(sequence.num_cached_tokens for sequences in rounds for sequence in sequences)


@pytest.mark.parametrize(
    ("options", "was_pressed"),
    [
        ({"num_blocks": 300, "windows": [(WINDOW, ENOUGH)]}, lambda s: s.num_preemptions == 0),
        ({"num_blocks": 60, "windows": [(WINDOW, 60)]}, lambda s: s.num_preemptions > 0),
    ],
    ids=["room", "preempted"],
)
def test_the_same_logits_cached_chunked_and_preempted(
    gemma, options: dict, was_pressed: Callable[[Scheduler], bool]
):
    rounds = make_rounds()
    plain = make_scheduler(num_blocks=300, block_size=BLOCK_SIZE, windows=[(WINDOW, 300)])
    expected = logits_of(gemma, plain, rounds)
    assert num_cached(rounds) == 0

    rounds = make_rounds()
    scheduler = make_scheduler(
        block_size=BLOCK_SIZE,
        prefix_eviction=LruPolicy(),
        max_num_seqs=4,
        max_num_batched_tokens=BUDGET,
        max_model_len=200,
        **options,
    )
    found = logits_of(gemma, scheduler, rounds)
    assert was_pressed(scheduler)
    assert num_cached(rounds) > 100
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert torch.isfinite(row).all()
        torch.testing.assert_close(found[key], row, rtol=1e-4, atol=1e-4)
