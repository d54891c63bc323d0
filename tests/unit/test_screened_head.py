"""The likeliest tokens found through an 8-bit copy are those that all logits give."""

import math
from collections.abc import Callable

import pytest
import torch
from attention_context import normal, num_threads
from builders import make_sequence

from shoal.backend.models.native_parts import screen
from shoal.backend.quantization.schemes import quantize_fp8, quantize_int4, quantize_int8
from shoal.backend.sampler import sample
from shoal.kernels.native_library import NativeLibrary, pointer
from shoal.kernels.native_plan import NativePlan, PlanBuilder, StepArguments
from shoal.kernels.quantized_panels import PANEL
from shoal.kernels.quantized_weights import Weight
from shoal.kernels.screened_head import LEAST_TOKENS, screen_head

SIZES = [(LEAST_TOKENS, 64), (LEAST_TOKENS + 17, 99)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class Head:
    """A model that is nothing but an output projection of given states."""

    def __init__(self, native: NativeLibrary, weight: Weight, states: torch.Tensor) -> None:
        plan = PlanBuilder(native, weight.dtype)
        hidden = plan.buffer(weight.shape[1], torch.float32)
        rounded = plan.buffer(weight.shape[1])
        plan.embed(states, out=hidden)
        plan.round(hidden, out=rounded)
        selected, packed = plan.select(rounded), native.pack_linear(weight)
        plan.likeliest(selected, packed, screen(weight))
        plan.logits(selected, packed)
        self.plan: NativePlan = plan.build()
        self._vocab_size = weight.shape[0]

    def run(self, rows: list[int], tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of these states, or with ``tokens`` only those."""
        ids = torch.tensor(rows)
        indices = torch.arange(len(rows))
        logits = torch.zeros(len(rows), self._vocab_size)
        self.plan.run(
            StepArguments(
                num_tokens=len(rows),
                num_samples=len(rows),
                block_size=16,
                num_threads=torch.get_num_threads(),
                input_ids=pointer(ids),
                positions=pointer(indices),
                logits_indices=pointer(indices),
                logits=pointer(logits),
                tokens=pointer(tokens),
            )
        )
        return logits

    def likeliest(self, rows: list[int]) -> list[int]:
        tokens = torch.full((len(rows),), -7)
        self.run(rows, tokens)
        return tokens.tolist()


def from_logits(native: NativeLibrary, logits: torch.Tensor) -> list[int]:
    """What the sampler makes of them; -1: no usable prediction."""
    chosen = sample(logits, [make_sequence(temperature=0.0) for _ in logits], native=native)
    return [getattr(token, "token_id", -1) for token in chosen]


def states_of_all_kinds(weight: torch.Tensor) -> torch.Tensor:
    """Rows that are hard in different ways."""
    vocab_size, width = weight.shape
    ordinary = normal(12, width, seed=5)
    outlier = normal(2, width, seed=6)
    outlier[:, 3] *= 400  # the group's other states are lost in 8 bits
    beside = weight[[7, vocab_size - 1]].float() * 3  # one token stands out
    orthogonal = torch.zeros(1, width)
    tiny = normal(1, width, seed=7) * 1e-36
    large = normal(1, width, seed=8) * 1e30
    broken = normal(3, width, seed=9)
    broken[0, 5], broken[1, 0], broken[2, width - 1] = math.nan, math.inf, -math.inf
    rows = [ordinary, outlier, beside, orthogonal, tiny, large, broken]
    return torch.cat(rows).to(weight.dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("vocab_size", "width"), SIZES)
def test_as_all_logits_say(
    native: NativeLibrary, dtype: torch.dtype, vocab_size: int, width: int, threads: int
) -> None:
    weight = normal(vocab_size, width, seed=1).to(dtype)
    states = states_of_all_kinds(weight)
    head = Head(native, weight, states)
    assert head.plan.screens
    rows = list(range(len(states)))
    with num_threads(threads):
        logits = head.run(rows)
        assert head.likeliest(rows) == from_logits(native, logits)
        assert from_logits(native, logits)[-3:] == [-1, -1, -1]
        assert [head.likeliest([row])[0] for row in rows] == from_logits(native, logits)


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4, quantize_fp8])
@pytest.mark.parametrize("vocab_size", [64, 131])
def test_quantised_and_small_ones_say_it_themselves(
    native: NativeLibrary,
    dtype: torch.dtype,
    vocab_size: int,
    quantize: Callable[[torch.Tensor, torch.dtype], Weight],
) -> None:
    weight = normal(vocab_size, 99, seed=1).to(dtype)
    states = states_of_all_kinds(weight)
    rows = list(range(len(states)))
    for head in (Head(native, quantize(weight, dtype), states), Head(native, weight, states)):
        assert head.likeliest(rows) == from_logits(native, head.run(rows))


def test_near_ties_and_ties(native: NativeLibrary, dtype: torch.dtype) -> None:
    """Tokens whose weights differ by less than 8 bits show, and tokens of the same weights."""
    base = normal(64, 80, seed=2)
    steps = torch.randn(LEAST_TOKENS, 80, generator=torch.Generator().manual_seed(3)) * 2e-3
    weight = (base.repeat(LEAST_TOKENS // 64, 1) * (1 + steps)).to(dtype)
    weight[5000] = weight[300] = weight[299] * 1.5
    states = torch.cat([normal(20, 80, seed=4).to(dtype), weight[5000:5001], -weight[5000:5001]])
    head = Head(native, weight, states)
    rows = list(range(len(states)))
    tokens = head.likeliest(rows)
    assert tokens == from_logits(native, head.run(rows))
    assert tokens[20] == 300  # the first of two equal ones


def test_a_row_alone_equals_the_row_among_others(native: NativeLibrary, dtype: torch.dtype) -> None:
    weight = normal(LEAST_TOKENS, 96, seed=1).to(dtype)
    states = normal(40, 96, seed=2).to(dtype)
    head = Head(native, weight, states)
    together = head.likeliest(list(range(40)))
    assert together == [head.likeliest([row])[0] for row in range(40)]


def test_columns_beyond_the_vocabulary_are_never_chosen(
    native: NativeLibrary, dtype: torch.dtype
) -> None:
    """The last panel's padding gives 0, which is more than any token's logit here."""
    weight = -normal(LEAST_TOKENS + 1, 64, seed=1).abs().to(dtype)
    states = normal(3, 64, seed=2).abs().to(dtype)
    head = Head(native, weight, states)
    rows = [0, 1, 2]
    logits = head.run(rows)
    assert bool((logits < 0).all())
    assert head.likeliest(rows) == from_logits(native, logits)


def test_rows_of_zeros(native: NativeLibrary, dtype: torch.dtype) -> None:
    weight = normal(LEAST_TOKENS, 64, seed=1).to(dtype)
    weight[:4000] = 0
    states = -weight[4001:4002] * 2
    head = Head(native, weight, states)
    assert head.likeliest([0]) == from_logits(native, head.run([0]))


def test_norms_of_columns(dtype: torch.dtype) -> None:
    """What is said of the 8 bits' errors is never less than what they are, and hardly more."""
    weight = normal(LEAST_TOKENS + 5, 130, seed=1).to(dtype)
    weight[::7] *= 50
    screened = screen_head(weight)
    assert screened is not None
    panels = screened.packed.weight.view(-(-len(weight) // PANEL), -1)
    body, floats = panels[:, : 132 * PANEL], panels[:, 132 * PANEL :].contiguous()
    scales, errors, norms = floats.view(torch.float32).view(-1, 3, PANEL).unbind(1)
    steps = body.view(-1, 33, PANEL, 4).transpose(1, 2).reshape(-1, 132)[: len(weight), :130]
    near = (steps.double() - 128) * scales.flatten()[: len(weight), None].double()
    for told, true in ((errors, weight.double() - near), (norms, near)):
        ratio = told.flatten()[: len(weight)].double() / true.norm(dim=1)
        assert float(ratio.min()) >= 1
        assert float(ratio.max()) < 1 + 1e-4


def test_all_panels_in_question(native: NativeLibrary, dtype: torch.dtype) -> None:
    """Many panels of nearly equal logits: all threads look at what one would."""
    weight = normal(1, 96, seed=1).repeat(LEAST_TOKENS, 1)
    weight += normal(LEAST_TOKENS, 96, seed=2) * 1e-4
    states = torch.cat([weight[:5] * 3, -weight[7:9], normal(9, 96, seed=3)])
    head = Head(native, weight.to(dtype), states.to(dtype))
    rows = list(range(len(states)))
    expected = from_logits(native, head.run(rows))
    for threads in (1, 2, 3):
        with num_threads(threads):
            assert head.likeliest(rows) == expected


@pytest.mark.parametrize("count", [1, 2, 5, 12, 13, 25, 37])
def test_states_far_larger_than_their_rows_others(
    native: NativeLibrary, dtype: torch.dtype, count: int
) -> None:
    """Of each row others, more of them than are multiplied once more, and of all sizes."""
    weight = normal(LEAST_TOKENS, 98, seed=1)
    weight[LEAST_TOKENS // 2 :] = weight[: LEAST_TOKENS // 2] * (1 + 1e-3)
    states = normal(count, 98, seed=2)
    for row in range(count):
        states[row, row : row + 1 + row % 9] *= 3.0 ** (row % 8)
    states[:, 97] *= 20
    head = Head(native, weight.to(dtype), states.to(dtype))
    rows = list(range(count))
    assert head.likeliest(rows) == from_logits(native, head.run(rows))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_not_screened(dtype: torch.dtype, value: float) -> None:
    weight = normal(LEAST_TOKENS, 64).to(dtype)
    weight[77, 3] = value
    assert screen_head(weight) is None


def test_small_vocabularies_are_not_screened(dtype: torch.dtype) -> None:
    assert screen_head(normal(LEAST_TOKENS - 1, 64).to(dtype)) is None


def test_a_broken_weight_says_it_itself(native: NativeLibrary, dtype: torch.dtype) -> None:
    weight = normal(LEAST_TOKENS, 64).to(dtype)
    weight[77, 3] = math.nan
    head = Head(native, weight, normal(3, 64, seed=1).to(dtype))
    assert head.likeliest([0, 1, 2]) == [-1, -1, -1]
