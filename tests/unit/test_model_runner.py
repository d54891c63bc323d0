import pytest
import torch
from builders import make_scheduler, make_sequence
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_layout import KVLayout
from shoal.backend.model_runner import FORWARD_FAILED, ModelRunner, build_forward_batch
from shoal.backend.weights.loader import load_model
from shoal.scheduler.outputs import ScheduledSequence, SchedulerOutput

CPU = torch.device("cpu")
BLOCK_SIZE = 4
VOCAB = 128
POISON = 111


def scheduled(sequence, num_computed, num_tokens, block_table):
    sequence.num_computed_tokens = num_computed
    sequence.block_tables = [block_table]
    return ScheduledSequence(sequence, num_tokens)


def test_the_batch_lays_sequences_out_one_after_another():
    chunk = scheduled(make_sequence(1, 10), 2, 5, [7, 3])  # positions 2..6 of 10: no sample yet
    decode = scheduled(make_sequence(2, 5, num_output_tokens=4), 8, 1, [1, 4, 9])
    batch = build_forward_batch([chunk, decode], BLOCK_SIZE, CPU)
    expected_ids = chunk.sequence.token_ids[2:7] + decode.sequence.token_ids[8:9]
    assert batch.input_ids.tolist() == expected_ids
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 8]
    (tables,) = batch.groups
    assert tables.slot_mapping.tolist() == [30, 31, 12, 13, 14, 36]
    assert tables.block_tables.tolist() == [[7, 3, 0], [1, 4, 9]]
    assert batch.query_lens == [5, 1]
    assert batch.groups[0].context_lens == [7, 9]
    assert batch.logits_indices.tolist() == [5]


class FakeModel:
    """Predicts each input id plus one; raises on a batch that holds the poison id."""

    def __init__(self):
        self.batch_sizes = []
        self.error = RuntimeError("poisoned")
        self.nan_id = None

    def forward(self, batch, kv):
        self.batch_sizes.append(len(batch.query_lens))
        if POISON in batch.input_ids.tolist():
            raise self.error
        logits = torch.zeros(len(batch.logits_indices), VOCAB)
        for row, token_id in enumerate(batch.input_ids[batch.logits_indices].tolist()):
            logits[row, token_id + 1] = float("nan") if token_id == self.nan_id else 1.0
        return logits


@pytest.fixture
def model():
    return FakeModel()


@pytest.fixture
def fake_runner(model):
    return ModelRunner(
        model, PagedKVCache(KVLayout.uniform(1, 1, 2), [8], BLOCK_SIZE, torch.float32), CPU
    )


def three_decodes(last_ids):
    items = []
    for seq_id, last_id in enumerate(last_ids):
        sequence = make_sequence(seq_id, 3, temperature=0.0)
        sequence.token_ids[-1] = last_id
        items.append(scheduled(sequence, 0, 3, [seq_id]))
    return SchedulerOutput(tuple(items))


def test_all_at_once_when_nothing_fails(model, fake_runner):
    result = fake_runner.run(three_decodes([50, 60, 70]))
    assert {seq_id: t.token_id for seq_id, t in result.sampled.items()} == {0: 51, 1: 61, 2: 71}
    assert not result.failed
    assert model.batch_sizes == [3]


def test_only_the_culprit_of_a_failed_forward_fails(model, fake_runner):
    result = fake_runner.run(three_decodes([50, POISON, 70]))
    assert {seq_id: t.token_id for seq_id, t in result.sampled.items()} == {0: 51, 2: 71}
    assert result.failed == {1: FORWARD_FAILED}
    assert model.batch_sizes == [3, 1, 1, 1]


def test_only_the_row_with_nan_fails(model, fake_runner):
    model.nan_id = 60
    result = fake_runner.run(three_decodes([50, 60, 70]))
    assert set(result.sampled) == {0, 2}
    assert set(result.failed) == {1}
    assert model.batch_sizes == [3]


def test_a_lost_device_is_nobodys_fault(model, fake_runner):
    model.error = torch.AcceleratorError("device-side assert")
    with pytest.raises(torch.AcceleratorError):
        fake_runner.run(three_decodes([50, POISON, 70]))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, torch.float32)


def generate(tiny_model, sequences, **scheduler_options):
    """Greedy output ids by seq_id, through scheduler, runner and paged cache."""
    scheduler = make_scheduler(block_size=BLOCK_SIZE, **scheduler_options)
    layout = tiny_model.config.kv_layout
    kv = PagedKVCache(layout, [scheduler.free_blocks], BLOCK_SIZE, torch.float32)
    runner = ModelRunner(tiny_model.model, kv, CPU)
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        result = runner.run(output)
        assert not result.failed
        scheduler.update_from_output(output, result.sampled, result.failed)
        scheduler.check_integrity()
    return (
        {s.seq_id: s.token_ids[s.num_prompt_tokens :] for s in sequences},
        scheduler.num_preemptions,
    )


def make_sequences(**sampling):
    return [make_sequence(i, 5 + 6 * i, max_tokens=20, **sampling) for i in range(5)]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_the_same_text_alone_together_chunked_and_preempted(tiny_model, sampling):
    alone = {}
    for sequence in make_sequences(**sampling):
        alone |= generate(tiny_model, [sequence])[0]
    assert len({tuple(ids) for ids in alone.values()}) > 1
    together, _ = generate(tiny_model, make_sequences(**sampling))
    chunked, _ = generate(tiny_model, make_sequences(**sampling), max_num_batched_tokens=8)
    preempted, num_preemptions = generate(tiny_model, make_sequences(**sampling), num_blocks=16)
    assert num_preemptions > 0
    assert together == alone
    assert chunked == alone
    assert preempted == alone
