"""Our paged attention as an attention function of transformers.

A model of transformers calls it once a layer with the new tokens' queries, keys and values. The
step it belongs to, which the model knows nothing of, comes by a context variable. While a model is
being examined the function only notes how each layer calls it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_layout import LayerKV
from shoal.kernels.kv_cache_write import kv_cache_write
from shoal.kernels.paged_attention import AttentionMetadata, paged_attention

NAME = "shoal_paged"
# Arguments of attention functions that change the result in ways that ours does not know.
_UNKNOWN_ARGUMENTS = ("position_bias", "s_aux", "head_mask", "indices")


@dataclass(slots=True)
class Examination:
    """How the layers of a model call their attention function, by layer."""

    layers: dict[int, LayerKV] = field(default_factory=dict)

    def note(
        self, layer_idx: int | None, key: torch.Tensor, value: torch.Tensor, **call: Any
    ) -> None:
        """Raises ConfigError for a call that paged attention cannot serve."""
        if layer_idx is None:
            raise ConfigError("its attention layers are not numbered")
        if layer_idx in self.layers:
            raise ConfigError(f"layer {layer_idx} attends more than once")
        if value.shape != key.shape:
            raise ConfigError("its values have another size than its keys")
        if call.get("is_causal") is False or call.get("attention_mask") is not None:
            raise ConfigError("its attention is not causal")
        for name in _UNKNOWN_ARGUMENTS:
            if call.get(name) is not None:
                raise ConfigError(f"its attention needs {name}")
        self.layers[layer_idx] = LayerKV(key.shape[1], key.shape[3], call.get("sliding_window"))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, as the layers' attention needs it."""

    batch: ForwardBatch
    kv: PagedKVCache
    metadata: tuple[AttentionMetadata, ...]  # by KV group

    @classmethod
    def of(cls, batch: ForwardBatch, kv: PagedKVCache) -> "Step":
        groups = zip(kv.layout.groups, batch.groups, strict=True)
        return cls(
            batch,
            kv,
            tuple(
                AttentionMetadata.build(
                    tables.block_tables,
                    batch.query_lens,
                    tables.context_lens,
                    kv.block_size,
                    group.window,
                    block_mass=batch.block_mass if group is kv.layout.groups[0] else None,
                )
                for group, tables in groups
            ),
        )


_current: ContextVar[Step | Examination] = ContextVar("current step")


@contextmanager
def attending(step: Step | Examination) -> Iterator[None]:
    """Calls of the attention function within belong to ``step``."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """From query [1, num_heads, num_tokens, head_dim] to [1, num_tokens, num_heads, head_dim].

    Key and value are [1, num_kv_heads, num_tokens, head_dim]: the new tokens' alone.
    """
    step = _current.get()
    layer_idx: Any = getattr(module, "layer_idx", None)
    if isinstance(step, Examination):
        is_causal = options.pop("is_causal", None)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        step.note(
            layer_idx, key, value, is_causal=is_causal, attention_mask=attention_mask, **options
        )
        return query.transpose(1, 2), None
    group = step.kv.layout.group_of[layer_idx]
    cache = step.kv.layer(layer_idx)
    slots = step.batch.groups[group].slot_mapping
    new_keys, new_values = (states[0].transpose(0, 1) for states in (key, value))
    kv_cache_write(new_keys, new_values, cache, slots)
    scale = 1 / math.sqrt(query.shape[3]) if scaling is None else scaling
    queries = query[0].transpose(0, 1)
    output = paged_attention(queries, cache, step.metadata[group], scale, softcap)
    return output[None], None
