"""A model of sliding and full layers through scheduler, prefix cache and paged caches."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders import make_scheduler, make_sequence
from tiny_checkpoint import write_tiny_checkpoint, write_tiny_windowed
from tiny_runs import BLOCK_SIZE, CPU, generate, make_kv_cache

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.messages import AddSequence
from shoal.backend.model_runner import ModelRunner
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.native import make_native
from shoal.backend.weights.catalogue import kernels_dir
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import load_native
from shoal.load.tiny_models import write_tiny_model
from shoal.scheduler.eviction import LruPolicy
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.window_blocks import most_window_blocks

WINDOW = 11
BUDGET = 16
ENOUGH = most_window_blocks(WINDOW, BLOCK_SIZE, 4, BUDGET)


# Two of Gemma 4's forms: shared keys, whose layers see the sampled rows alone, and experts.
GEMMA4 = ("Gemma 4 (E2B)", "Gemma 4 (26B-A4B)")


@pytest.fixture(scope="module", params=["reference", "native", *GEMMA4])
def gemma(request, tmp_path_factory):
    """Gemma 3 on both kernels, Gemma 4 on the native ones."""
    folder = tmp_path_factory.mktemp("gemma")
    if request.param in GEMMA4:
        write_tiny_model(request.param, folder, torch.float32, sliding_window=WINDOW)
    else:
        write_tiny_windowed(folder, WINDOW)
    loaded = load_model(folder, torch.float32)
    if request.param == "reference":
        return loaded
    return replace(loaded, model=make_native(loaded.model, load_native(kernels_dir())))


class Recorder:
    """The model; keeps the logits of its last step."""

    def __init__(self, model) -> None:
        self._model = model
        self.logits = torch.empty(0)

    def forward(self, batch, kv):
        self.logits = self._model.forward(replace(batch, likeliest=None), kv)
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
    assert num_cached(rounds) > 50
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert torch.isfinite(row).all()
        if isinstance(gemma.model, Decoder):
            torch.testing.assert_close(found[key], row, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found[key], row)


@pytest.mark.parametrize("cached", [True, False])
def test_forked_choices_have_the_texts_that_they_have_alone(gemma, cached: bool):
    def choices() -> list[Sequence]:
        return [make_sequence(idx, 30, prompt_seed=0, seed=idx, max_tokens=20) for idx in range(3)]

    options = {"num_blocks": 64, "max_num_batched_tokens": 12, "windows": [(WINDOW, 64)]}
    alone = {}
    for sequence in choices():
        alone |= generate(gemma, [sequence], **options).texts
    eviction = LruPolicy() if cached else None
    forked = generate(gemma, choices(), forks_of=0, prefix_eviction=eviction, **options)
    assert forked.texts == alone


def test_an_engine_from_settings_runs_long_texts_in_few_window_blocks(tmp_path):
    write_tiny_checkpoint(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    config = EngineConfig(
        weights=str(tmp_path),
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_kv_blocks=200,
        max_num_seqs=2,
        max_num_batched_tokens=BUDGET,
        num_threads=1,
    )
    engine, ready = build_engine(config, lambda phase, done, total: None)
    assert (ready.num_blocks, ready.max_model_len) == (200, 512)
    sampling = SamplingParams(temperature=0.0, max_tokens=150)
    prompt = list(range(5, 95))
    for seq_id in range(2):
        engine.add(AddSequence(seq_id, prompt, len(prompt), sampling))
    texts: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            texts[output.seq_id].append(output.token.token_id)
    assert len(texts[0]) == 150
    assert texts[0] == texts[1]
    assert engine.status.num_preemptions == 0
    assert engine.status.free_blocks == 200
