"""What a request changes in the logits before a token is chosen, each row on its own.

In this order: tokens that the sequence's grammar forbids, and end-of-text ids before min_tokens,
are masked; logit_bias is added; then come the repetition, presence and frequency penalties. The
filters of ``sampler`` come after that; reported log-probabilities are those of the logits as the
model gave them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

# Of sequences that follow a grammar, by seq_id: which tokens may come next, bool [vocab_size].
AllowedTokens = Mapping[int, torch.Tensor]


def process_logits(
    logits: torch.Tensor, sequences: list[Sequence], allowed_tokens: AllowedTokens
) -> torch.Tensor:
    """Logits [num_samples, vocab_size] as the sequences want them; a copy where any differs."""
    rows = [row for row, sequence in enumerate(sequences) if _changes_logits(sequence)]
    if not rows:
        return logits
    processed = logits.clone()
    for row in rows:
        sequence = sequences[row]
        if sequence.sampling.grammar is not None:
            allowed = allowed_tokens[sequence.seq_id].to(logits.device)
            processed[row].masked_fill_(~allowed, -math.inf)
        _process_row(processed[row], sequence)
    return processed


def stop_ids(sequence: Sequence) -> Iterable[int]:
    """The token ids that end the sequence."""
    if sequence.sampling.ignore_eos:
        return sequence.sampling.stop_token_ids
    return sequence.eos_token_ids.union(sequence.sampling.stop_token_ids)


def _changes_logits(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return (
        sequence.num_output_tokens < sampling.min_tokens
        or sampling.grammar is not None
        or bool(sampling.logit_bias)
        or sampling.has_penalties
    )


def _process_row(logits: torch.Tensor, sequence: Sequence) -> None:
    """Change one row [vocab_size] in place."""
    sampling = sequence.sampling
    if sequence.num_output_tokens < sampling.min_tokens:
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
