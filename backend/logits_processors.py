"""What a request changes in the logits before a token is chosen, each row on its own.

In this order: tokens that the sequence's grammar forbids, and end-of-text ids before min_tokens,
are masked; logit_bias is added; then come the repetition, presence and frequency penalties. The
filters of ``sampler`` come after that; reported log-probabilities are those of the logits as the
model gave them.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from shoal.kernels.native_library import NativeLibrary
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Which tokens may come next in sequences that follow a grammar.

    ``packed`` is int32 [n, (vocab_size + 31) // 32] on the CPU, a bit a token, the lowest first;
    ``rows`` says by seq_id which row is whose.
    """

    packed: torch.Tensor
    rows: dict[int, int] = field(default_factory=dict)

    def of(self, seq_id: int, vocab_size: int) -> torch.Tensor:
        """Of one sequence, unpacked: bool [vocab_size]."""
        return ~_forbidden(self.packed[self.rows[seq_id]][None], vocab_size)[0]


NONE_ALLOWED = AllowedTokens(torch.zeros(0, 0, dtype=torch.int32))


def process_logits(
    logits: torch.Tensor,
    sequences: list[Sequence],
    allowed_tokens: AllowedTokens = NONE_ALLOWED,
    native: NativeLibrary | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Logits [num_samples, vocab_size] as the sequences want them; unless ``in_place``, a copy
    where any differs."""
    rows = [row for row, sequence in enumerate(sequences) if changes_logits(sequence)]
    if not rows:
        return logits
    processed = logits if in_place else logits.clone()
    masked = [row for row in rows if sequences[row].sampling.grammar is not None]
    if masked:
        wanted = [allowed_tokens.rows[sequences[row].seq_id] for row in masked]
        _mask(processed, masked, allowed_tokens.packed[wanted], native)
    for row in rows:
        _process_row(processed[row], sequences[row])
    return processed


def _mask(
    logits: torch.Tensor, rows: list[int], packed: torch.Tensor, native: NativeLibrary | None
) -> None:
    if native is not None:
        native.mask(logits, rows, packed)
        return
    forbidden = _forbidden(packed.to(logits.device), logits.shape[1])
    for row, mask in zip(rows, forbidden, strict=True):
        logits[row].masked_fill_(mask, -math.inf)


def _forbidden(packed: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """What is not allowed; bool [n, vocab_size]."""
    bits = torch.arange(32, dtype=torch.int32, device=packed.device)
    return ((packed[:, :, None] >> bits) & 1).eq(0).flatten(1)[:, :vocab_size]


def stop_ids(sequence: Sequence) -> Collection[int]:
    """The token ids that end the sequence."""
    if sequence.sampling.ignore_eos:
        return sequence.sampling.stop_token_ids
    return sequence.eos_token_ids.union(sequence.sampling.stop_token_ids)


def changes_logits(sequence: Sequence) -> bool:
    """Whether any of these applies to the sequence's next token."""
    sampling = sequence.sampling
    return (
        masks_ends(sequence)
        or sampling.grammar is not None
        or bool(sampling.logit_bias)
        or sampling.has_penalties
    )


def masks_ends(sequence: Sequence) -> bool:
    """Whether it may not end yet, though there are tokens that would end it."""
    least = sequence.sampling.min_tokens
    return least > 0 and sequence.num_output_tokens < least and bool(stop_ids(sequence))


def _process_row(logits: torch.Tensor, sequence: Sequence) -> None:
    """Change one row [vocab_size] in place."""
    sampling = sequence.sampling
    if masks_ends(sequence):
        ids = [token_id for token_id in stop_ids(sequence) if token_id < len(logits)]
        logits[ids] = -math.inf
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        logits[list(ids)] += logits.new_tensor(biases)
    if sampling.has_penalties:
        _penalize(logits, sequence, sampling)


def _penalize(logits: torch.Tensor, sequence: Sequence, sampling: SamplingParams) -> None:
    """Repetition (CTRL, arXiv 1909.05858) counts prompt and output; presence and frequency, as
    OpenAI defines them, the output alone."""
    if sampling.repetition_penalty != 1.0:
        ids = list(set(sequence.token_ids))
        seen = logits[ids]
        penalty = sampling.repetition_penalty
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
        penalties = [
            sampling.presence_penalty + sampling.frequency_penalty * count
            for count in counts.values()
        ]
        logits[list(counts)] -= logits.new_tensor(penalties)
