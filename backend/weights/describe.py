"""What a checkpoint is, from its headers alone and without torch: for ``shoal models``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.registry import config_from_gguf, config_from_hf
from shoal.backend.text.gguf_metadata import read_gguf_metadata

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
    """Of a GGUF file or a folder. Raises ConfigError in one line."""
    if path.is_dir() and (path / "config.json").is_file():
        return _describe_folder(path)
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(ggufs) != 1:
        raise ConfigError(f"{path.name} holds neither config.json nor exactly one .gguf file.")
    metadata = read_gguf_metadata(ggufs[0])
    kind = _GGUF_TYPES.get(metadata.get("general.file_type", -1), "mixed")
    # Which tensors there are makes no difference to what is told here.
    config = config_from_gguf(metadata, ())
    return _facts(config, f"GGUF {kind}", ggufs[0].stat().st_size)


def _describe_folder(folder: Path) -> CheckpointFacts:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder.name}: config.json cannot be read.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{folder.name}: config.json must hold a JSON object.")
    form = _folder_format(values)
    return _facts(config_from_hf(values), form, size)


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
