"""Running a loaded model over a paged cache by hand: no scheduler, no sampler."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch

from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.model_runner import Model, build_forward_batch
from shoal.backend.models.any_config import AnyConfig
from shoal.scheduler.outputs import ScheduledSequence
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

BLOCK_SIZE = 4
CPU = torch.device("cpu")


class PagedModel:
    """A model with a cache for ``num_sequences`` sequences of ``max_len`` tokens."""

    def __init__(
        self,
        model: Model,
        config: AnyConfig,
        dtype: torch.dtype,
        num_sequences: int,
        max_len: int,
    ) -> None:
        self._model = model
        self._width = -(-max_len // BLOCK_SIZE)
        self._num_groups = len(config.kv_layout.groups)
        num_blocks = [num_sequences * self._width] * self._num_groups
        self._kv = PagedKVCache(config.kv_layout, num_blocks, BLOCK_SIZE, dtype)
        # Scattered: a sequence's blocks are wherever there was room.
        generator = torch.Generator().manual_seed(0)
        self._free = torch.randperm(num_blocks[0], generator=generator).tolist()

    def add(self, prompt: SequenceOf[int]) -> Sequence:
        """A sequence of which nothing is computed yet."""
        blocks = [self._free.pop() for _ in range(self._width)]
        tables = [blocks] * self._num_groups
        return Sequence(blocks[0], list(prompt), len(prompt), SamplingParams(), block_tables=tables)

    @torch.inference_mode()
    def step(self, sequences: SequenceOf[Sequence], all_rows: bool = False) -> torch.Tensor:
        """Compute all that is uncomputed, in one batch; logits [len(sequences), vocab_size] of the
        last tokens, or of all computed tokens."""
        items = [ScheduledSequence(item, item.num_uncomputed_tokens) for item in sequences]
        batch = build_forward_batch(items, BLOCK_SIZE, CPU)
        if all_rows:
            batch = replace(batch, logits_indices=torch.arange(len(batch.input_ids)))
        logits = self._model.forward(batch, self._kv)
        for item in items:
            item.sequence.num_computed_tokens += item.num_tokens
        return logits


class TheirSequence:
    """A sequence in a model of transformers, fed piece by piece through its own cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None

    @torch.inference_mode()
    def feed(self, token_ids: SequenceOf[int]) -> torch.Tensor:
        """float32 logits [num_tokens, vocab_size]."""
        ids = torch.tensor([list(token_ids)])
        output = self._model(ids, past_key_values=self._cache, use_cache=True)
        self._cache = output.past_key_values
        logits: torch.Tensor = output.logits[0].float()
        return logits
