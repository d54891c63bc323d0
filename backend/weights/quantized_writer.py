"""``shoal quantize``: a checkpoint folder in the layout of compressed-tensors, which transformers,
vLLM and this loader read. Embedding, output projection and norms stay as they are."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.build import weight_shapes
from shoal.backend.quantization.plan import plan_formats
from shoal.backend.quantization.schemes import (
    INT4_GROUP,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from shoal.backend.weights.loader import Progress, check_tensors
from shoal.backend.weights.safetensors import SafetensorsCheckpoint
from shoal.kernels.quantized_weights import unpack_int4

SCHEMES = ("int8", "int4", "fp8")
SHARD_BYTES = 4 * 2**30
_KEPT = ("*.json", "*.jinja", "*.model", "*.txt")  # what is copied: tokenizer, templates, configs
_ENDS = ("lm_head.weight", "embed_tokens.weight")

Tensors = dict[str, torch.Tensor]


def write_quantized(
    source: Path, target: Path, scheme: str, progress: Progress | None = None
) -> None:
    """Quantise the checkpoint folder ``source`` into the new folder ``target``.

    The folder appears whole or not at all. Raises ConfigError, naming the file and the tensor.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"quantization must be one of {', '.join(SCHEMES)}.")
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{source.name} must be a folder with config.json and safetensors; a GGUF file is "
            "quantised already."
        )
    if target.exists():
        raise ConfigError(f"{target.name} exists already; name a new folder.")
    checkpoint = SafetensorsCheckpoint(source)
    shapes = weight_shapes(checkpoint.config)
    check_tensors(checkpoint, shapes, checkpoint.config)
    formats = plan_formats(shapes, scheme)
    chosen = {name: scheme for name in formats if not name.endswith(_ENDS)}
    group_size = _group_size(shapes[name][1] for name in chosen)
    with _beside(target) as folder:
        for pattern in _KEPT:
            for path in source.glob(pattern):
                if not path.name.endswith(".index.json"):
                    shutil.copyfile(path, folder / path.name)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = _description(scheme, group_size)
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _write_tensors(checkpoint, shapes, chosen, group_size, folder, progress or _ignore)


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder that becomes ``target`` at the end. Raises ConfigError if it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".quantizing-") as scratch:
            folder = Path(scratch) / "checkpoint"
            folder.mkdir()
            yield folder
            folder.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{target} cannot be written: {reason}.") from error


def _write_tensors(
    checkpoint: SafetensorsCheckpoint,
    shapes: dict[str, tuple[int, ...]],
    formats: dict[str, str],
    group_size: int,
    folder: Path,
    progress: Progress,
) -> None:
    """Shard after shard, so that little more than one is held."""
    total = sum(checkpoint.num_bytes(name) for name in shapes)
    pending: Tensors = {}
    index: dict[str, str] = {}
    done = 0
    paths: list[tuple[Path, list[str]]] = []

    def flush() -> None:
        path = folder / f"shard-{len(paths)}"
        save_file(pending, path, metadata={"format": "pt"})
        paths.append((path, list(pending)))
        pending.clear()

    for name in shapes:
        weight = checkpoint.load(name, torch.bfloat16)
        if not isinstance(weight, torch.Tensor):
            raise ConfigError(f"{checkpoint.where(name)} is quantised already.")
        kind = formats.get(name)
        pending |= {name: weight} if kind is None else _parts(name, weight, kind, group_size)
        done += checkpoint.num_bytes(name)
        progress("weights", done, total)
        if sum(tensor.nbytes for tensor in pending.values()) > SHARD_BYTES:
            flush()
    if pending:
        flush()
    for number, (path, names) in enumerate(paths, 1):
        final = f"model-{number:05d}-of-{len(paths):05d}.safetensors"
        path.rename(folder / ("model.safetensors" if len(paths) == 1 else final))
        index |= dict.fromkeys(names, final)
    if len(paths) > 1:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _parts(name: str, weight: torch.Tensor, kind: str, group_size: int) -> Tensors:
    """The tensors of one quantised module."""
    stem = name.removesuffix(".weight")
    if kind == "int4":
        # Symmetric: transformers expects another shape of zero points than its library writes.
        packed = quantize_int4(weight, torch.bfloat16, group_size, symmetric=True)
        values = unpack_int4(packed.values, packed.in_features)
        return {
            f"{stem}.weight_packed": _pack_words(values),
            f"{stem}.weight_scale": packed.scales,
            f"{stem}.weight_shape": torch.tensor(weight.shape),
        }
    quantized = (quantize_int8 if kind == "int8" else quantize_fp8)(weight, torch.bfloat16)
    scales = quantized.scales[:, None].bfloat16()
    return {f"{stem}.weight": quantized.values, f"{stem}.weight_scale": scales}


def _pack_words(values: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k] of 0 to 15 to int32 [n, ceil(k / 8)], the first value in the lowest bits."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % 8)).long()
    shifts = torch.arange(0, 32, 4)
    return (padded.view(len(values), -1, 8) << shifts).sum(-1).to(torch.int32)


def _group_size(widths: Iterable[int]) -> int:
    """The format asks for whole groups: the largest size of 128 and below that fits all rows."""
    sizes = list(widths)
    for size in (INT4_GROUP, 64, 32, 16):
        if all(width % size == 0 for width in sizes):
            return size
    return 8


def _description(scheme: str, group_size: int) -> dict[str, Any]:
    """``quantization_config`` of config.json."""
    if scheme == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size}
        form, states = "pack-quantized", None
    else:
        kind = {"int8": "int", "fp8": "float"}[scheme]
        weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
        form = f"{kind}-quantized"
        states = {
            "num_bits": 8,
            "type": kind,
            "strategy": "token",
            "dynamic": True,
            "symmetric": True,
        }
    group = {
        "targets": ["Linear"],
        "weights": weights | {"symmetric": True, "dynamic": False},
        "input_activations": states,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _ignore(phase: str, done: int, total: int) -> None:
    """No one is watching."""
