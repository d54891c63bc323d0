"""Heads as the native kernels take them: their shape, and what happens to them before attention."""

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch

from shoal.kernels.layer_cache import SCALED_DTYPES, LayerCache

LARGEST_HEAD_DIM = 1024
STORED_IDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int8: 2,
    torch.float8_e4m3fn: 3,
}


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of a layer, and how they attend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    window: int | None = None  # a query at cache index p sees (p - window, p]; None: all up to p
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert 0 < self.head_dim <= LARGEST_HEAD_DIM

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim


class NewKeys(IntEnum):
    """What a row holds beside its queries; as in ``native/rows.h``."""

    OWN = 0  # keys and values
    VALUES_ARE_KEYS = 1  # keys; a value is its key, before norm and rotation
    NONE = 2  # nothing: the layer reads another layer's cache


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over single heads, before the rotation; a weight is float32 [head_dim]."""

    eps: float
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: bool = False  # normalised without a weight


class PlanHeads(ctypes.Structure):
    """As in ``native/plan_step.h``. Whoever makes one keeps the norms' weights alive."""

    _fields_ = [
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("norm_eps", ctypes.c_float),
        ("new_keys", ctypes.c_int32),
        ("norm_queries", ctypes.c_int32),
        ("norm_keys", ctypes.c_int32),
        ("norm_values", ctypes.c_int32),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
    ]

    @classmethod
    def of(
        cls,
        heads: AttentionHeads,
        rotary_dim: int = 0,
        norms: HeadNorms | None = None,
        new_keys: NewKeys = NewKeys.OWN,
    ) -> "PlanHeads":
        assert rotary_dim <= heads.head_dim
        assert rotary_dim % 2 == 0
        norms = norms or HeadNorms(0.0)
        return cls(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            rotary_dim=rotary_dim,
            window=heads.window or 0,
            scale=heads.scale,
            softcap=heads.softcap or 0.0,
            norm_eps=norms.eps,
            new_keys=new_keys,
            norm_queries=norms.query is not None,
            norm_keys=norms.key is not None,
            norm_values=norms.value,
            query_norm=_norm_pointer(norms.query, heads.head_dim),
            key_norm=_norm_pointer(norms.key, heads.head_dim),
        )


def _norm_pointer(weight: torch.Tensor | None, head_dim: int) -> int | None:
    if weight is None:
        return None
    assert weight.dtype == torch.float32
    assert weight.shape == (head_dim,)
    assert weight.is_contiguous()
    return weight.data_ptr()


class CacheArguments(ctypes.Structure):
    """LayerCache of ``native/stored.h``."""

    _fields_ = [
        ("stored", ctypes.c_int32),
        ("keys_in_panels", ctypes.c_int32),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    ]


def check_cache(cache: LayerCache, dtype: torch.dtype) -> None:
    """Raises ValueError for a cache that kernels of this dtype cannot use."""
    stored = cache.keys.dtype
    scaled = stored in SCALED_DTYPES
    if stored not in STORED_IDS or (dtype == torch.bfloat16 and stored == torch.float32):
        raise ValueError(f"the native kernels cannot use keys of {stored} in {dtype}")
    if cache.keys_in_panels and not dtype == stored == torch.bfloat16:
        raise ValueError(f"the native kernels cannot use panels of keys of {stored} in {dtype}")
    tensors = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    if any(tensor is None for tensor in tensors[2:]) == scaled:
        raise ValueError("a cache of 8-bit keys has scales, and no other has them")
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError("the native kernels need contiguous caches")


class BatchArguments(ctypes.Structure):
    """Batch of ``native/attention_work.h``."""

    _fields_ = [
        ("num_seqs", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("block_tables", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
    ]
