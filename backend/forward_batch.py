"""The tensors of one step: the only thing the runner hands to a model."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the tokens of a batch lie in the caches of one group of layers.

    Blocks that a sliding window has left behind read 0; a kernel that is given the window never
    reads them.
    """

    slot_mapping: torch.Tensor  # int64 [num_tokens]: block_id * block_size + offset
    block_tables: torch.Tensor  # int64 [num_seqs, max_blocks], padded with 0
    context_lens: list[int]  # [num_seqs]: tokens in the cache including this step's


@dataclass(frozen=True, slots=True)
class SoftTokens:
    """Tokens of a batch that stand for parts of images: an encoder gives their embeddings."""

    rows: torch.Tensor  # int64 [num_soft]: rows of the batch
    embeddings: torch.Tensor  # [num_soft, hidden_size]
    # By sequence, the positions of each image's tokens; no image is cut by the end of a step.
    spans: list[list[range]]


@dataclass(slots=True)
class HiddenStates:
    """Where a forward pass leaves the final, normalised hidden states of the rows that get logits:
    float32 [num_samples, hidden_size]."""

    states: torch.Tensor | None = None


@dataclass(slots=True)
class LikeliestTokens:
    """Where a forward pass that need not compute all logits leaves the token of the largest one of
    each row, the first where they tie: int64 [num_samples], -1 where that is no finite number."""

    tokens: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A flat batch: the tokens of all scheduled sequences, one after another, without padding.

    Filled by ModelRunner, read by models and kernels. Host-side lists beside tensors serve the
    reference attention, which walks sequence by sequence.

    Rotary embeddings go by position; slots, block tables and context lengths by cache index, which
    is smaller in the first group where a lossy KV policy dropped blocks from a sequence.
    """

    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    groups: tuple[GroupTables, ...]  # as in the model's KVLayout
    query_lens: list[int]  # [num_seqs], sums to num_tokens
    logits_indices: torch.Tensor  # int64 [num_samples]: rows of the hidden states to project
    # int64 [num_seqs, max_blocks] of the first group, zeros: the forward pass adds the attention
    # mass (see kernels/attention_mass.py) that each block got from this step, in all heads
    # of the group's layers. None: nobody asks.
    block_mass: torch.Tensor | None = None
    hidden: HiddenStates | None = None  # None: nobody asks
    # Set where nothing but the likeliest tokens is wanted. A model may leave them there, and then
    # its logits mean nothing; one that does not know of it gives logits as ever.
    likeliest: LikeliestTokens | None = None
    soft_tokens: SoftTokens | None = None  # None: all tokens are of the vocabulary
    # Logits of an earlier step that nobody reads any more: a model may write its own there, which
    # spares the system to find and clear as much memory in each step.
    spent_logits: torch.Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self.logits_indices)


@dataclass(frozen=True, slots=True)
class KnownStates:
    """A step whose final, normalised hidden states are known already: they lack the output
    projection alone. The rest is as in ``ForwardBatch``."""

    states: torch.Tensor  # float32 [num_samples, hidden_size], as HiddenStates had them
    likeliest: LikeliestTokens | None = None
    spent_logits: torch.Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self.states)
