"""What the registry knows of a family: which checkpoints are of it, and how to read them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.gguf_config import GgufDescription
from shoal.backend.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How one GGUF architecture differs from the checkpoints of transformers."""

    read: Callable[[GgufDescription], ModelConfig]
    # Parts of a layer's tensor names, ours (of safetensors) to GGUF's, beside the usual ones.
    layer_names: Mapping[str, str] = field(default_factory=dict)
    # Rows of Q and K are ordered so that rotated pairs lie side by side.
    pairs_are_neighbours: bool = False
    # Norm weights are stored as 1 + weight.
    norms_add_one: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models. ``hf`` by architecture in config.json, ``gguf`` by GGUF's name."""

    name: str
    hf: Mapping[str, Callable[[Mapping[str, Any]], AnyConfig]]
    gguf: Mapping[str, GgufForm] = field(default_factory=dict)
