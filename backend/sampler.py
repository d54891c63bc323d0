"""From logits to tokens, each row on its own.

A row's token depends on its logits, its sampling parameters, (seed, output index) and nothing
else: not on the rows beside it, their number or order. Filters apply in this order, as in
transformers: temperature, top_k, top_p, min_p, typical_p. Each keeps every token that ties with
the last one kept, so no sort order shows in the result. The draw inverts the cumulative
distribution, in order of token id, at the point that Philox gives for (seed, output index).

Probabilities become whole numbers before they are summed: integer sums are exact, hence the same
on every device, for every number of threads and in every batch.
"""

import math
from dataclasses import dataclass

import torch

from shoal.backend.logits_processors import (
    NONE_ALLOWED,
    AllowedTokens,
    masks_ends,
    process_logits,
)
from shoal.backend.philox import NUM_RANDOM_BITS, random_bits
from shoal.kernels.native_library import NativeLibrary, SampleParams
from shoal.scheduler.outputs import SampledToken
from shoal.scheduler.sequence import Sequence

# A probability of 1. Its sum over a row stays far below 2**63, and a token less likely than
# 2**-40 (one in 10**12) is never drawn.
WEIGHT_ONE = 2**40
# top_p first looks among this many most likely tokens, and sorts the whole row only if they do
# not reach top_p together.
TOP_P_PREFIX = 1024


@dataclass(frozen=True, slots=True)
class SampleError:
    """Why a row gave no token; only its own sequence fails."""

    message: str


UNUSABLE = SampleError("The model gave no usable prediction for this sequence (NaN or infinite).")


def sample(
    logits: torch.Tensor,  # float32 [num_samples, vocab_size]
    sequences: list[Sequence],  # one a row
    allowed_tokens: AllowedTokens = NONE_ALLOWED,
    native: NativeLibrary | None = None,
    keeps_logits: bool = True,
) -> list[SampledToken | SampleError]:
    """Choose the next token of each sequence; those with a grammar need their allowed tokens.

    Unless ``keeps_logits``, the logits may be changed.

    The native kernels do it in one call. Their sums of floats have another order, so about one draw
    in a million falls on a neighbouring token; the rest is the same.
    """
    if logits.device.type == "mps":  # sampling there would need 64-bit types that it lacks
        logits = logits.cpu()
    in_place = not keeps_logits and all(s.sampling.logprobs is None for s in sequences)
    allowed = process_logits(logits, sequences, allowed_tokens, native, in_place)
    if native is None:
        token_ids = _choose(allowed, sequences)
    else:
        token_ids = _choose_natively(allowed, sequences, native)
    return [
        describe_token(logits[row], sequence.sampling.logprobs, token_ids[row])
        if token_ids[row] >= 0
        else UNUSABLE
        for row, sequence in enumerate(sequences)
    ]


def takes_likeliest(sequence: Sequence) -> bool:
    """Whether the next token is that of the largest logit, of which nothing else is told."""
    return sequence.only_likeliest and not masks_ends(sequence)


def take_likeliest(token_ids: list[int]) -> list[SampledToken | SampleError]:
    """The tokens that a model chose; -1 stands for no usable prediction."""
    return [SampledToken(token_id) if token_id >= 0 else UNUSABLE for token_id in token_ids]


def _choose(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """A token id a row; -1 where the best logit is no finite number."""
    best_logits, best_ids = logits.max(dim=-1)  # the lowest id where logits tie
    usable = torch.isfinite(best_logits)  # the maximum of a row with NaN is NaN
    token_ids: list[int] = torch.where(usable, best_ids, -1).tolist()
    drawn_rows = [
        row
        for row, sequence in enumerate(sequences)
        if token_ids[row] >= 0 and not sequence.sampling.greedy
    ]
    if drawn_rows:
        drawn = [sequences[row] for row in drawn_rows]
        for row, token_id in zip(drawn_rows, _draw(logits[drawn_rows], drawn), strict=True):
            token_ids[row] = token_id
    return token_ids


def _choose_natively(
    logits: torch.Tensor, sequences: list[Sequence], native: NativeLibrary
) -> list[int]:
    """The same by the native kernels, but for rows with typical_p, which is rare."""
    token_ids = native.sample(
        logits.contiguous(), [_native_params(sequence) for sequence in sequences]
    )
    for row, sequence in enumerate(sequences):
        params = sequence.sampling
        if params.typical_p < 1.0 and not params.greedy and token_ids[row] >= 0:
            (token_ids[row],) = _draw(logits[row : row + 1], [sequence])
    return token_ids


def _native_params(sequence: Sequence) -> SampleParams:
    params = sequence.sampling
    if params.greedy:
        return SampleParams(temperature=0.0)
    return SampleParams(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        random_bits=_random_bits(sequence),
    )


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Token ids drawn from rows that hold at least one finite logit."""
    weights = _filtered_weights(logits, sequences)
    cumulative = weights.cumsum(dim=-1)  # int64 [num_rows, vocab_size]
    points = [
        _random_point(sequence, total)
        for sequence, total in zip(sequences, cumulative[:, -1].tolist(), strict=True)
    ]
    targets = torch.tensor(points, dtype=torch.int64, device=logits.device)
    # The first token whose cumulative weight exceeds the target: one of weight above zero.
    return torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0].tolist()


def _random_point(sequence: Sequence, total: int) -> int:
    """A whole number, uniform in [0, total)."""
    return (_random_bits(sequence) * total) >> NUM_RANDOM_BITS


def _random_bits(sequence: Sequence) -> int:
    seed = sequence.sampling.seed
    return random_bits(sequence.seq_id if seed is None else seed, sequence.num_output_tokens)


def _filtered_weights(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Whole-number weights after all filters; int64 [num_rows, vocab_size], 0: excluded."""
    params = [sequence.sampling for sequence in sequences]
    temperatures = logits.new_tensor([p.temperature for p in params])[:, None]
    # Relative to the best logit, so that a small temperature cannot overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    _apply_top_k(scaled, [p.top_k for p in params])
    weights = (torch.softmax(scaled, dim=-1) * WEIGHT_ONE).to(torch.int64)
    _apply_top_p(weights, [p.top_p for p in params])
    _apply_min_p(weights, [p.min_p for p in params])
    _apply_typical_p(weights, [p.typical_p for p in params])
    return weights


def _apply_top_k(scaled: torch.Tensor, top_ks: list[int]) -> None:
    """Set to -inf, in place, all but each row's top_k largest (0: keep all)."""
    vocab_size = scaled.shape[-1]
    rows = [row for row, k in enumerate(top_ks) if 0 < k < vocab_size]
    if not rows:
        return
    ks = [top_ks[row] for row in rows]
    largest = scaled[rows].topk(max(ks), dim=-1).values
    thresholds = largest[range(len(rows)), [k - 1 for k in ks]]
    selected = scaled[rows]
    scaled[rows] = selected.masked_fill(selected < thresholds[:, None], -math.inf)


def _apply_top_p(weights: torch.Tensor, top_ps: list[float]) -> None:
    """Set to 0, in place, all but each row's likeliest tokens that together reach top_p."""
    rows = [row for row, p in enumerate(top_ps) if p < 1.0]
    if not rows:
        return
    selected = weights[rows]
    totals = selected.sum(dim=-1).tolist()
    targets = [
        max(1, math.ceil(total * top_ps[row])) for row, total in zip(rows, totals, strict=True)
    ]
    thresholds = _top_p_thresholds(selected, targets)
    weights[rows] = selected.masked_fill(selected < thresholds[:, None], 0)


def _top_p_thresholds(weights: torch.Tensor, targets: list[int]) -> torch.Tensor:
    """The weight of the token at which each row's descending sum reaches its target."""
    target = torch.tensor(targets, dtype=torch.int64, device=weights.device)[:, None]
    prefix = weights.topk(min(TOP_P_PREFIX, weights.shape[-1]), dim=-1).values
    thresholds = _weight_at(prefix, target)
    flat = (prefix.sum(dim=-1) < target[:, 0]).nonzero()[:, 0]
    if len(flat):
        ordered = weights[flat].sort(dim=-1, descending=True).values
        thresholds[flat] = _weight_at(ordered, target[flat])
    return thresholds


def _weight_at(descending: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Where the running sum reaches the target; the last weight where it never does."""
    cut = torch.searchsorted(descending.cumsum(dim=-1), target)
    return descending.gather(-1, cut.clamp(max=descending.shape[-1] - 1))[:, 0]


def _apply_min_p(weights: torch.Tensor, min_ps: list[float]) -> None:
    """Set to 0, in place, tokens less likely than min_p times the likeliest."""
    if not any(min_ps):
        return
    best = weights.amax(dim=-1).tolist()
    floors = [math.ceil(weight * p) for weight, p in zip(best, min_ps, strict=True)]
    floor = torch.tensor(floors, dtype=torch.int64, device=weights.device)[:, None]
    weights.masked_fill_(weights < floor, 0)


def _apply_typical_p(weights: torch.Tensor, typical_ps: list[float]) -> None:
    """Set to 0, in place, all but the tokens whose surprise is nearest to the expected one and that
    together reach typical_p (Meister et al., arXiv 2202.00666)."""
    for row, mass in enumerate(typical_ps):
        if mass < 1.0:
            kept = _typical(weights[row], mass)
            weights[row].masked_fill_(~kept, 0)


def _typical(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Which tokens of one row [vocab_size] are typical; bool [vocab_size]."""
    total = int(weights.sum())
    probs = weights.double() / total
    surprise = -probs.log()  # inf where the weight is 0
    expected = (weights.double() * surprise).nan_to_num(0.0).to(torch.int64).sum().double() / total
    distance = (surprise - expected).abs()
    ordered, ids = distance.sort()
    reached = weights[ids].cumsum(0) >= max(1, math.ceil(total * mass))
    return (distance <= ordered[reached.to(torch.uint8).argmax()]) & (weights > 0)


def describe_token(logits: torch.Tensor, num_logprobs: int | None, token_id: int) -> SampledToken:
    """A token with its logprobs: of the raw logits [vocab_size], before every filter."""
    if num_logprobs is None:
        return SampledToken(token_id)
    logprobs = torch.log_softmax(logits, dim=-1)
    return SampledToken(token_id, logprobs[token_id].item(), _top_logprobs(logprobs, num_logprobs))


def _top_logprobs(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` best, best first, the lower id first where they tie."""
    count = min(count, logprobs.shape[-1])
    if count == 0:
        return ()
    threshold = logprobs.topk(count).values[-1]
    ids = (logprobs >= threshold).nonzero()[:, 0]
    pairs = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
