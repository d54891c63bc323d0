"""Checkpoints in GGUF: metadata, and tensors dequantised from the mapped file."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.model_config import ModelConfig

GGUF_MAGIC = b"GGUF"

# Parts of names, safetensors to GGUF, of architecture llama.
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FROM_GGUF_TOP = {theirs: ours for ours, theirs in _TOP_NAMES.items()}
_FROM_GGUF_LAYER = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}
_ROPE_FACTORS = "rope_freqs.weight"


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
        reader = _open(path)
        self.metadata = GgufMetadata(reader)
        self._raw = {tensor.name: tensor for tensor in reader.tensors}
        self._raw_names = {_safetensors_name(name): name for name in self._raw}
        try:
            self.config = ModelConfig.from_gguf(
                self.metadata, self._raw.keys(), self._rope_factors()
            )
        except ConfigError as error:
            raise ConfigError(f"{path.name}: {error}") from error

    def names(self) -> set[str]:
        return set(self._raw_names) - {_ROPE_FACTORS}

    def shape(self, name: str) -> tuple[int, ...]:
        # GGUF has the fastest dimension first.
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def num_bytes(self, name: str) -> int:
        return int(self._tensor(name).n_bytes)

    def where(self, name: str) -> str:
        return f"{self._file_name}: tensor {self._raw_names.get(name) or _gguf_name(name)}"

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._dequantize(self._raw_names[name]).reshape(self.shape(name))
        if ".q_proj." in name:
            tensor = _unpermute(tensor, self.config.num_heads)
        elif ".k_proj." in name:
            tensor = _unpermute(tensor, self.config.num_kv_heads)
        return tensor.to(dtype).contiguous()

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        return self._raw[self._raw_names[name]]

    def _dequantize(self, raw_name: str) -> torch.Tensor:
        raw = self._raw[raw_name]
        try:
            values = gguf.dequantize(raw.data, raw.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self._file_name}: tensor {raw_name} has type {raw.tensor_type.name}, "
                "which cannot be read. Use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or Q*_K."
            ) from error
        # What is stored as float32 comes as a view of the mapped file.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _rope_factors(self) -> tuple[float, ...]:
        if _ROPE_FACTORS not in self._raw:
            return ()
        return tuple(self._dequantize(_ROPE_FACTORS).tolist())


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


def _open(path: Path) -> gguf.GGUFReader:
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
    except (ValueError, LookupError, OverflowError, TypeError) as error:
        raise ConfigError(f"{path.name} is damaged or cut short; fetch it again.") from error


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{_LAYER_NAMES.get(match[2], match[2])}.{suffix}"
    return f"{_TOP_NAMES.get(stem, stem)}.{suffix}"


def _safetensors_name(name: str) -> str:
    """Names that are unknown stay as they are, and the loader refuses them."""
    stem, _, suffix = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    if match and match[2] in _FROM_GGUF_LAYER:
        return f"model.layers.{match[1]}.{_FROM_GGUF_LAYER[match[2]]}.{suffix}"
    if stem in _FROM_GGUF_TOP:
        return f"{_FROM_GGUF_TOP[stem]}.{suffix}"
    return name


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order of Q and K in llama GGUFs: rotated pairs lie side by side there.

    [num_heads, head_dim / 2, 2, ...] back to [num_heads, 2, head_dim / 2, ...].
    """
    half = tensor.shape[0] // num_heads // 2
    pairs = tensor.reshape(num_heads, half, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
