import math
from dataclasses import replace

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TypicalLogitsWarper

from shoal.backend import sampler
from shoal.backend.logits_processors import NONE_ALLOWED, AllowedTokens, process_logits
from shoal.backend.sampler import SampleError, takes_likeliest
from shoal.backend.weights.catalogue import kernels_dir
from shoal.kernels.native_library import NativeLibrary, load_native
from shoal.scheduler.outputs import SampledToken
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)
_way: dict[str, NativeLibrary | None] = {}


@pytest.fixture(params=["torch", "native"], autouse=True)
def way(request):
    """What this file says holds for both ways to sample."""
    _way["native"] = load_native(kernels_dir()) if request.param == "native" else None


def sample(logits, sequences, allowed_tokens=None):
    return sampler.sample(logits, sequences, allowed_tokens or NONE_ALLOWED, _way["native"])


def sequence(params=GREEDY, num_outputs=0, seq_id=1, eos=(2,)):
    tokens = [5, 6, 7] + [8] * num_outputs
    return Sequence(seq_id, tokens, 3, params, eos_token_ids=frozenset(eos))


def random_logits(num_rows, vocab=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 3


def draw_ids(row, params, num_draws):
    """Many draws from one row: the output index is the draw number."""
    sequences = [sequence(params, num_outputs=i) for i in range(num_draws)]
    return [token.token_id for token in sample(row.expand(num_draws, -1), sequences)]


def possible_ids(row, params):
    return set(draw_ids(row, replace(params, seed=3), 400))


def test_greedy_takes_the_best_and_the_lowest_id_among_ties():
    logits = torch.zeros(2, VOCAB)
    logits[0, [9, 4, 30]] = 2.0
    logits[1, 49] = 1.0
    assert [t.token_id for t in sample(logits, [sequence(), sequence()])] == [4, 49]


@pytest.mark.parametrize("params", [SamplingParams(temperature=1e-12), SamplingParams(top_k=1)])
def test_a_tiny_temperature_and_top_k_1_are_greedy(params):
    logits = random_logits(1)
    assert draw_ids(logits[0], params, 20) == [int(logits.argmax())] * 20


def test_a_small_temperature_does_not_overflow():
    logits = random_logits(1) * 1e37
    params = SamplingParams(temperature=2e-5, seed=1)
    assert draw_ids(logits[0], params, 5) == [int(logits.argmax())] * 5


def test_draws_follow_the_softmax():
    row = random_logits(1, vocab=8)[0]
    num_draws = 4000
    ids = draw_ids(row, SamplingParams(temperature=1.5, seed=11), num_draws)
    expected = torch.softmax(row / 1.5, dim=-1) * num_draws
    counts = torch.bincount(torch.tensor(ids), minlength=8)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.4  # 99.9th percentile at 7 degrees of freedom


def test_top_k_keeps_the_k_best_and_their_ties():
    row = torch.tensor([0.0, 1.0, 1.0, 2.0, 0.5])
    assert possible_ids(row, SamplingParams(top_k=2)) == {1, 2, 3}
    assert possible_ids(row, SamplingParams(top_k=100)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    row = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert possible_ids(row, SamplingParams(top_p=0.4)) == {0}
    assert possible_ids(row, SamplingParams(top_p=0.7)) == {0, 1}
    assert possible_ids(row, SamplingParams(top_p=0.76)) == {0, 1, 2}
    assert possible_ids(row, SamplingParams(top_p=1e-9)) == {0}


def test_min_p_is_relative_to_the_best():
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert possible_ids(row, SamplingParams(min_p=0.5)) == {0, 1}
    assert possible_ids(row, SamplingParams(min_p=1.0)) == {0}
    assert possible_ids(row, SamplingParams(min_p=0.01)) == {0, 1, 2, 3}


def test_filters_apply_in_order():
    # top_p counts within what top_k kept: 0.5 of (0.5 + 0.3) already reaches 0.6.
    row = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    assert possible_ids(row, SamplingParams(top_p=0.6)) == {0, 1}
    assert possible_ids(row, SamplingParams(top_p=0.6, top_k=2)) == {0}
    # A higher temperature flattens before top_p looks.
    assert len(possible_ids(row, SamplingParams(top_p=0.6, temperature=2.0))) > 1


def test_top_p_beyond_the_prefix_equals_a_full_sort():
    row = torch.linspace(0, 1, 5000)  # so flat that 0.9 of it needs thousands of tokens
    probs, order = torch.softmax(row.double(), dim=-1).sort(descending=True)
    count = int((probs.cumsum(0) < 0.9).sum()) + 1
    allowed = set(order[:count].tolist())
    params = SamplingParams(top_p=0.9, seed=5)
    ids = draw_ids(row, params, 500)
    assert set(ids) <= allowed
    assert min(ids) < min(allowed) + 100  # and the far end of the allowed set is reached


MIXED = [
    SamplingParams(seed=1),
    SamplingParams(seed=1, temperature=0.3),
    GREEDY,
    SamplingParams(seed=2, top_k=7),
    SamplingParams(seed=-3, top_p=0.8),
    SamplingParams(seed=4, top_k=20, top_p=0.9, min_p=0.05, temperature=1.7),
    SamplingParams(seed=5, min_p=0.2, min_tokens=9),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(seed=6, typical_p=0.7, frequency_penalty=0.5, presence_penalty=-1.0),
    SamplingParams(seed=7, repetition_penalty=1.5, logit_bias=((8, 4.0), (9, -100.0))),
]


@pytest.mark.parametrize("vocab", [50, 49152])
def test_a_row_does_not_depend_on_the_rows_beside_it(vocab):
    logits = random_logits(len(MIXED) * 4, vocab)
    sequences = [sequence(MIXED[i % len(MIXED)], num_outputs=i) for i in range(len(logits))]
    together = sample(logits, sequences)
    alone = [sample(logits[i : i + 1], [sequences[i]])[0] for i in range(len(logits))]
    backwards = sample(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards


def test_the_draw_depends_on_seed_and_output_index_only():
    row = random_logits(1)[0] / 3
    first = draw_ids(row, SamplingParams(seed=42), 30)
    assert draw_ids(row, SamplingParams(seed=42), 30) == first
    assert draw_ids(row, SamplingParams(seed=43), 30) != first
    assert len(set(first)) > 1
    other_id = sequence(SamplingParams(seed=42), num_outputs=7, seq_id=99)
    assert sample(row[None], [other_id])[0].token_id == first[7]


def test_min_tokens_masks_every_way_to_stop():
    row = torch.zeros(VOCAB)
    row[2], row[3], row[9] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3, 10**6))
    ids = [sample(row[None], [sequence(params, num_outputs=i)])[0].token_id for i in range(3)]
    assert ids == [9, 9, 2]
    assert row[2] == 9.0  # the caller's logits are left alone


def test_ignore_eos_leaves_eos_to_be_sampled_but_masks_stop_ids():
    row = torch.zeros(VOCAB)
    row[2], row[3] = 8.0, 9.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,), ignore_eos=True)
    assert sample(row[None], [sequence(params)])[0].token_id == 2


def test_only_tokens_that_could_end_it_too_soon_keep_a_greedy_text_from_the_likeliest_token():
    soon = SamplingParams(temperature=0.0, min_tokens=2)
    endless = replace(soon, ignore_eos=True)
    assert not takes_likeliest(sequence(soon, num_outputs=1))
    assert not takes_likeliest(sequence(replace(endless, stop_token_ids=(0,))))
    assert takes_likeliest(sequence(soon, num_outputs=2))
    assert takes_likeliest(sequence(endless))
    assert takes_likeliest(sequence(soon, eos=()))


def test_logprobs_are_of_the_raw_logits_best_first():
    row = random_logits(1)[0]
    row[[20, 21]] = row.max() + 1  # a tie at the top
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, logprobs=4)
    (token,) = sample(row[None], [sequence(params)])
    expected = torch.log_softmax(row, dim=-1)
    assert token.logprob == expected[token.token_id].item()
    assert [i for i, _ in token.top_logprobs[:2]] == [20, 21]
    values = [value for _, value in token.top_logprobs]
    assert values == expected.sort(descending=True).values[:4].tolist()


def test_logprobs_zero_gives_only_the_tokens_own():
    logits = random_logits(2)
    sequences = [sequence(replace(GREEDY, logprobs=0)), sequence()]
    with_logprob, without = sample(logits, sequences)
    assert with_logprob.logprob is not None
    assert with_logprob.top_logprobs == ()
    assert without.logprob is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, top_p=0.9)])
def test_a_broken_row_fails_alone(bad, params):
    logits = random_logits(3)
    expected = sample(logits[::2], [sequence(params), sequence(params)])
    logits[1, 17] = bad
    first, broken, last = sample(logits, [sequence(params)] * 3)
    assert isinstance(broken, SampleError)
    assert [first, last] == expected
    assert isinstance(first, SampledToken)


def test_a_row_with_nothing_allowed_fails():
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 2] = 1.0
    params = SamplingParams(min_tokens=1, seed=1)
    (only,) = sample(logits, [sequence(params)])
    assert isinstance(only, SampleError)


def test_typical_p_keeps_the_tokens_nearest_to_the_expected_surprise():
    row = torch.tensor([0.5, 0.2, 0.2, 0.05, 0.05]).log()
    # Entropy 1.29 nats: 0.2 (1.61) lies nearest, then 0.5 (0.69), then 0.05 (3.00).
    assert possible_ids(row, SamplingParams(typical_p=0.3)) == {1, 2}
    assert possible_ids(row, SamplingParams(typical_p=0.6)) == {0, 1, 2}
    assert possible_ids(row, SamplingParams(typical_p=0.95)) == {0, 1, 2, 3, 4}
    assert possible_ids(row, SamplingParams(typical_p=0.3, top_k=1)) == {0}


@pytest.mark.parametrize("mass", [0.2, 0.5, 0.9, 0.99])
def test_typical_p_agrees_with_transformers(mass):
    row = random_logits(1)[0]
    warped = TypicalLogitsWarper(mass=mass)(torch.zeros(1, 1, dtype=torch.long), row[None])[0]
    allowed = set(warped.isfinite().nonzero()[:, 0].tolist())
    drawn = set(draw_ids(row, SamplingParams(typical_p=mass, seed=3), 3000))
    assert drawn <= allowed
    likely = {i for i in allowed if torch.softmax(warped, -1)[i] > 0.01}
    assert likely <= drawn


def test_presence_and_frequency_penalties_count_the_output_alone():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 8], logits[0, 9] = 3.0, 2.5, 1.0  # 5 is in the prompt, 8 is output
    presence = SamplingParams(temperature=0.0, presence_penalty=2.0)
    frequency = SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias=((5, -100.0),))
    assert sample(logits, [sequence(presence, num_outputs=2)])[0].token_id == 5
    assert sample(logits, [sequence(frequency, num_outputs=1)])[0].token_id == 8
    assert sample(logits, [sequence(frequency, num_outputs=2)])[0].token_id == 9


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = random_logits(1)
    seq = sequence(SamplingParams(temperature=0.0, repetition_penalty=penalty), num_outputs=3)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([seq.token_ids]), logits.clone()
    )
    assert torch.equal(process_logits(logits, [seq]), expected)


def test_logit_bias_moves_the_choice_and_not_the_reported_logprob():
    logits = random_logits(1)
    params = SamplingParams(temperature=0.0, logprobs=0, logit_bias=((17, 100.0),))
    token = sample(logits, [sequence(params)])[0]
    assert token.token_id == 17
    assert token.logprob == pytest.approx(torch.log_softmax(logits[0], -1)[17].item())


def test_processors_leave_the_neighbours_and_the_input_alone():
    logits = random_logits(3)
    before = logits.clone()
    changed = SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=((3, 50.0),))
    rows = [sequence(num_outputs=4), sequence(changed, num_outputs=4), sequence(num_outputs=4)]
    processed = process_logits(logits, rows)
    assert torch.equal(logits, before)
    assert torch.equal(processed[[0, 2]], logits[[0, 2]])
    assert processed[1, 3] == logits[1, 3] + 50
    alone = process_logits(logits[1:2], rows[1:2])
    assert torch.equal(processed[1:2], alone)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("vocab", [1, 65, 3000, 49152])
def test_both_ways_draw_the_same_tokens(vocab, spread):
    logits = random_logits(2 * len(MIXED), vocab, seed=vocab) * spread
    sequences = [sequence(MIXED[i % len(MIXED)], num_outputs=i) for i in range(len(logits))]
    sequences = [replace_stops(item) for item in sequences]
    native = sampler.sample(logits, sequences, {}, load_native(kernels_dir()))
    assert native == sampler.sample(logits, sequences)


def replace_stops(item):
    """Without what could forbid the only token of the smallest vocabulary."""
    params = replace(item.sampling, min_tokens=0, logit_bias=())
    return replace(item, sampling=params, token_ids=[0] * len(item.token_ids))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 272, 1000])
def test_masks_leave_what_they_allow(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    logits[0, 0] = math.nan
    words = (vocab_size + 31) // 32
    packed = torch.randint(-(2**31), 2**31, (3, words), generator=generator, dtype=torch.int32)
    packed[0, 0], packed[1] = -1, 0
    rows = [
        Sequence(seq_id, [1], 1, SamplingParams(grammar="x" if seq_id != 2 else None))
        for seq_id in range(4)
    ]
    allowed = AllowedTokens(packed, {0: 2, 1: 0, 3: 1})
    expected = logits.clone()
    for seq_id, row in allowed.rows.items():
        for token_id in range(vocab_size):
            if not int(packed[row, token_id // 32]) >> token_id % 32 & 1:
                expected[seq_id, token_id] = -math.inf
    before = logits.clone()
    found = process_logits(logits, rows, allowed, _way["native"])
    assert torch.equal(found.nan_to_num(9), expected.nan_to_num(9))
    assert torch.equal(logits.nan_to_num(9), before.nan_to_num(9))
    assert process_logits(logits, rows, allowed, _way["native"], in_place=True) is logits
    assert torch.equal(logits.nan_to_num(9), expected.nan_to_num(9))
