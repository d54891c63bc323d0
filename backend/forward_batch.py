"""The tensors of one step: the only thing the runner hands to a model."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A flat batch: the tokens of all scheduled sequences, one after another, without padding.

    Filled by ModelRunner, read by models and kernels. Host-side lists beside tensors serve the
    reference attention, which walks sequence by sequence.
    """

    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens]: block_id * block_size + offset
    block_tables: torch.Tensor  # int64 [num_seqs, max_blocks], padded with 0
    query_lens: list[int]  # [num_seqs], sums to num_tokens
    context_lens: list[int]  # [num_seqs]: computed tokens including this step's
    logits_indices: torch.Tensor  # int64 [num_samples]: rows of the hidden states to project
