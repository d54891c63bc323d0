"""Checkpoints in GGUF: metadata, and tensors dequantised from the mapped file."""

import mmap
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.registry import config_from_gguf, gguf_form

GGUF_MAGIC = b"GGUF"
_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

# Parts of names, safetensors to GGUF.
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
# An architecture may have others beside or instead (GgufForm).
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# Tensors that hold a matrix for each expert.
_EXPERT_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_SLICE_BYTES = 2**19  # of the file, dequantised at a time


class GgufMetadata(Mapping[str, Any]):
    """Metadata by key, decoded on access (token lists are long)."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class GgufCheckpoint:
    """A GGUF file as a TensorSource. The file stays mapped while this lives.

    Raises ConfigError, naming the file, when it is not GGUF, cut short or of an unknown kind.
    """

    def __init__(self, path: Path) -> None:
        self._file_name = path.name
        self._reader = reader = _open(path)
        self.metadata = GgufMetadata(reader)
        self._raw = {tensor.name: tensor for tensor in reader.tensors}
        try:
            self._form = gguf_form(self.metadata)
            self._layer_names = _LAYER_NAMES | dict(self._form.layer_names)
            self._expert_of: dict[str, int] = {}  # names of single experts, within their tensor
            self._raw_names = self._find_names()
            self.config = config_from_gguf(self.metadata, self._raw.keys(), self._rope_factors())
        except ConfigError as error:
            raise ConfigError(f"{path.name}: {error}") from error

    def names(self) -> set[str]:
        return set(self._raw_names) - {_ROPE_FACTORS}

    def shape(self, name: str) -> tuple[int, ...]:
        # GGUF has the fastest dimension first.
        sizes = tuple(int(size) for size in reversed(self._tensor(name).shape))
        return sizes[1:] if name in self._expert_of else sizes

    def packed_names(self) -> Container[str]:
        return ()

    def num_bytes(self, name: str) -> int:
        num_bytes, tensor = int(self._tensor(name).n_bytes), self._tensor(name)
        return num_bytes // int(tensor.shape[-1]) if name in self._expert_of else num_bytes

    def where(self, name: str) -> str:
        return f"{self._file_name}: tensor {self._raw_names.get(name) or self._gguf_name(name)}"

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        adds_one = self._form.norms_add_one and name.endswith("norm.weight")
        kept = torch.float32 if adds_one else dtype  # one is taken away before rounding
        values = self._dequantize(self._raw_names[name], kept, self._expert_of.get(name))
        tensor = values.reshape(self.shape(name))
        if self._form.pairs_are_neighbours and ".q_proj." in name:
            tensor = _unpermute(tensor, self.config.num_heads)
        elif self._form.pairs_are_neighbours and ".k_proj." in name:
            tensor = _unpermute(tensor, self.config.num_kv_heads)
        elif adds_one:
            tensor = tensor - 1
        return tensor.to(dtype).contiguous()

    def _find_names(self) -> dict[str, str]:
        """Names in the file by those in safetensors. What is unknown stays as it is, and the loader
        refuses it."""
        tops = {theirs: ours for ours, theirs in _TOP_NAMES.items()}
        parts = {theirs: ours for ours, theirs in self._layer_names.items()}
        found = {}
        for name in self._raw:
            stem, _, suffix = name.rpartition(".")
            match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
            if match and match[2] in _EXPERT_NAMES:
                for idx in range(int(self._raw[name].shape[-1])):
                    part = f"experts.{idx}.{_EXPERT_NAMES[match[2]]}.{suffix}"
                    found[f"model.layers.{match[1]}.mlp.{part}"] = name
                    self._expert_of[f"model.layers.{match[1]}.mlp.{part}"] = idx
            elif match and match[2] in parts:
                found[f"model.layers.{match[1]}.{parts[match[2]]}.{suffix}"] = name
            else:
                found[f"{tops[stem]}.{suffix}" if stem in tops else name] = name
        return found

    def _gguf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
            return f"blk.{match[1]}.{self._layer_names.get(match[2], match[2])}.{suffix}"
        return f"{_TOP_NAMES.get(stem, stem)}.{suffix}"

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        return self._raw[self._raw_names[name]]

    def _dequantize(
        self, raw_name: str, dtype: torch.dtype, expert: int | None = None
    ) -> torch.Tensor:
        """A slice of rows at a time, so that little is held beside the tensor in ``dtype``."""
        raw = self._raw[raw_name]
        data = raw.data if expert is None else raw.data[expert]
        is_vector = data.ndim == 1
        if is_vector:  # of bytes, in blocks that are not to be cut: one row
            data = data[None]
        step = max(1, _SLICE_BYTES * len(data) // max(1, data.nbytes))
        whole = None
        for first in range(0, max(1, len(data)), step):
            part = self._dequantize_slice(raw, data[first : first + step])
            if whole is None:
                whole = torch.empty((len(data), *part.shape[1:]), dtype=dtype)
            whole[first : first + step] = part
        assert whole is not None
        self._reader.let_go(raw)
        return whole[0] if is_vector else whole

    def _dequantize_slice(self, raw: gguf.ReaderTensor, data: np.ndarray[Any, Any]) -> torch.Tensor:
        try:
            values = gguf.dequantize(data, raw.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self._file_name}: tensor {raw.name} has type {raw.tensor_type.name}, "
                f"which cannot be read. Use a file in {', '.join(_READABLE)}."
            ) from error
        # What is stored as float32 comes as a view of the mapped file.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _rope_factors(self) -> tuple[float, ...]:
        if _ROPE_FACTORS not in self._raw:
            return ()
        return tuple(self._dequantize(_ROPE_FACTORS, torch.float32).tolist())


class _Reader(gguf.GGUFReader):
    """The library's reader over a plain view of the mapped file.

    It slices the file once for each token of the vocabulary, and a slice of a numpy.memmap costs
    several times one of an array. Whatever is sliced from the view keeps the mapping alive.
    """

    @property  # type: ignore[override]
    def data(self) -> np.ndarray[Any, Any]:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap[Any, Any]) -> None:
        self._data = mapped.view(np.ndarray)
        self._mapping = mapped.base

    def let_go(self, tensor: gguf.ReaderTensor) -> None:
        """Take a tensor's part of the file out of this process's memory, where the system can: it
        is read again if it is asked for again."""
        if isinstance(self._mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            first = -(-tensor.data_offset // mmap.PAGESIZE) * mmap.PAGESIZE
            length = tensor.data_offset + tensor.n_bytes - first
            if length > 0:
                self._mapping.madvise(mmap.MADV_DONTNEED, first, length)


def _open(path: Path) -> _Reader:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}.") from error
    if magic != GGUF_MAGIC:
        raise ConfigError(f"{path.name} is not a GGUF file.")
    try:
        return _Reader(path)
    # The library has no error of its own: whatever its parsing trips over comes out.
    except (
        ValueError,
        LookupError,
        OverflowError,
        TypeError,
        AttributeError,
        MemoryError,
    ) as error:
        raise ConfigError(f"{path.name} is damaged or cut short; fetch it again.") from error


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order of Q and K in llama GGUFs: rotated pairs lie side by side there.

    [num_heads, head_dim / 2, 2, ...] back to [num_heads, 2, head_dim / 2, ...].
    """
    half = tensor.shape[0] // num_heads // 2
    pairs = tensor.reshape(num_heads, half, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
