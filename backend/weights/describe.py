"""What a checkpoint is, from its headers alone and without torch: for ``shoal models``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.registry import config_from_gguf, config_from_hf
from shoal.backend.text.gguf_metadata import read_gguf_metadata, read_gguf_tensors
from shoal.backend.weights.checkpoint_folder import read_json, weight_files
from shoal.backend.weights.safetensors_header import SafetensorsHeader

USABLE_FRACTION = 0.9  # of the free memory, as for the KV cache
_KV_ITEM_BYTES = 2
# general.file_type of GGUF, by https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_GGUF_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1"}
_GGUF_TYPES |= {14: "Q4_K", 15: "Q4_K", 16: "Q5_K", 17: "Q5_K", 18: "Q6_K", 32: "BF16"}


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Of one checkpoint. Lengths in tokens."""

    family: str
    format: str  # of the weights in the file
    num_bytes: int  # of the weights in the file
    context: int
    kv_bytes_per_token: int

    def longest_context(self, available_bytes: int) -> int:
        """How much context fits beside weights as large as the file; 0: not even they do."""
        room = int(available_bytes * USABLE_FRACTION) - self.num_bytes
        return max(0, min(self.context, room // self.kv_bytes_per_token))


def describe_checkpoint(path: Path) -> CheckpointFacts:
    """Of a GGUF file or a folder. Raises ConfigError in one line, also where a file ends before
    what its header announces."""
    if path.is_dir() and (path / "config.json").is_file():
        return _describe_folder(path)
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(ggufs) != 1:
        raise ConfigError(f"{path.name} holds neither config.json nor exactly one .gguf file.")
    metadata = read_gguf_metadata(ggufs[0])
    kind = _GGUF_TYPES.get(metadata.get("general.file_type", -1), "mixed")
    # Which tensors there are makes no difference to what is told here.
    config = config_from_gguf(metadata, ())
    return _facts(config, f"GGUF {kind}", _checked_gguf_bytes(ggufs[0]))


def _checked_gguf_bytes(path: Path) -> int:
    """The file's size. Raises ConfigError, naming a tensor that does not lie in it whole."""
    from gguf.constants import GGML_QUANT_SIZES  # brings numpy

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    file_bytes = path.stat().st_size
    for info in read_gguf_tensors(path):
        if info.kind not in sizes:
            raise ConfigError(f"{path.name}: tensor {info.name} is of unknown type {info.kind}.")
        block_elements, block_bytes = sizes[info.kind]
        end = info.begin + math.prod(info.shape) // block_elements * block_bytes
        if end > file_bytes:
            raise ConfigError(
                f"{path.name}: tensor {info.name} ends at byte {end}, but the file has "
                f"{file_bytes}; fetch it again."
            )
    return file_bytes


def _describe_folder(folder: Path) -> CheckpointFacts:
    try:
        values = read_json(folder / "config.json")
        files = weight_files(folder)
        for path in files:
            SafetensorsHeader(path)  # complains of a file that is not whole
        form = _folder_format(values)
        config = config_from_hf(values)
    except ConfigError as error:
        raise ConfigError(f"{folder.name}: {error}") from error
    return _facts(config, form, sum(path.stat().st_size for path in files))


def _folder_format(values: dict[str, Any]) -> str:
    quantization = values.pop("quantization_config", None)
    if isinstance(quantization, Mapping):
        return f"{quantization.get('quant_method')} {quantization.get('format', '')}".strip()
    return f"safetensors {values.get('dtype') or values.get('torch_dtype') or ''}".strip()


def _facts(config: AnyConfig, form: str, num_bytes: int) -> CheckpointFacts:
    layout = config.kv_layout
    # Layers with a window keep only that much, whatever the context.
    elements = sum(layout.layers[idx].elements_per_token for idx in layout.groups[0].layers)
    per_token = max(1, elements) * _KV_ITEM_BYTES
    return CheckpointFacts(
        config.family, form, num_bytes, config.max_position_embeddings, per_token
    )
