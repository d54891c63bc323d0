"""One step's batch and caches as the native plan takes them."""

import ctypes
from array import array

import torch

from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.kernels.native_heads import STORED_IDS, check_cache
from shoal.kernels.native_library import pointer
from shoal.kernels.native_plan import StepArguments, StepGroup


class StepBuilder:
    """Gathers the addresses that a plan needs; those of the caches once a cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._caches = _CachePointers(dtype)

    def arguments(
        self,
        batch: ForwardBatch,
        kv: PagedKVCache,
        logits: torch.Tensor,
        sample_lens: list[int] | None = None,
        states: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> StepArguments:
        """Valid as long as batch, cache and logits are, and until the next call.

        ``sample_lens`` [num_seqs], how many of its last rows each sequence samples from, is for
        plans that go on with those alone.
        """
        caches = self._caches
        caches.update(kv)
        context_lens = [group.context_lens for group in batch.groups]
        sample_lens = sample_lens or [0] * len(batch.query_lens)
        self._lens = [array("q", lens) for lens in (batch.query_lens, sample_lens, *context_lens)]
        self._groups = (StepGroup * len(batch.groups))(
            *(
                StepGroup(
                    group.block_tables.shape[1],
                    pointer(group.block_tables, torch.int64),
                    pointer(group.slot_mapping, torch.int64),
                    _address(lens),
                )
                for group, lens in zip(batch.groups, self._lens[2:], strict=True)
            )
        )
        return StepArguments(
            num_tokens=len(batch.input_ids),
            num_seqs=len(batch.query_lens),
            num_samples=len(batch.logits_indices),
            block_size=kv.block_size,
            num_threads=torch.get_num_threads(),
            stored=caches.stored,
            keys_in_panels=caches.keys_in_panels,
            input_ids=pointer(batch.input_ids, torch.int64),
            positions=pointer(batch.positions, torch.int64),
            query_lens=_address(self._lens[0]),
            sample_lens=_address(self._lens[1]),
            logits_indices=pointer(batch.logits_indices, torch.int64),
            groups=ctypes.addressof(self._groups),
            layer_groups=caches.address("layer_groups"),
            key_caches=caches.address("keys"),
            value_caches=caches.address("values"),
            key_scales=caches.address("key_scales"),
            value_scales=caches.address("value_scales"),
            logits=pointer(logits, torch.float32),
            block_mass=pointer(batch.block_mass, torch.int64),
            hidden_states=pointer(states, torch.float32),
            tokens=pointer(tokens, torch.int64),
        )


def _address(values: "array[int]") -> int:
    return values.buffer_info()[0]


class _CachePointers:
    """Arrays, by layer, of the addresses of keys, values and scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._cache: PagedKVCache | None = None
        self._arrays: dict[str, ctypes.Array] = {}
        self.stored = 0
        self.keys_in_panels = False

    def address(self, name: str) -> int:
        return ctypes.addressof(self._arrays[name])

    def update(self, kv: PagedKVCache) -> None:
        if self._cache is kv:
            return
        layers = [kv.layer(idx) for idx in range(kv.num_layers)]
        for layer in layers:
            check_cache(layer, self._dtype)
        array = ctypes.c_void_p * len(layers)
        for name in ("keys", "values", "key_scales", "value_scales"):
            self._arrays[name] = array(*(pointer(getattr(layer, name)) for layer in layers))
        group_of = kv.layout.group_of
        self._arrays["layer_groups"] = (ctypes.c_int64 * len(layers))(*group_of)
        self.stored = STORED_IDS[layers[0].keys.dtype]
        self.keys_in_panels = layers[0].keys_in_panels
        assert all(layer.keys_in_panels == self.keys_in_panels for layer in layers)
        self._cache = kv
