"""The families that can run, and from a checkpoint's own description to its ModelConfig."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from shoal.backend.engine_config import ConfigError
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.config_values import or_default, required
from shoal.backend.models.families.gemma3 import GEMMA3
from shoal.backend.models.families.gemma4 import GEMMA4
from shoal.backend.models.families.llama import LLAMA, MISTRAL, SMOLLM3
from shoal.backend.models.families.mixtral import MIXTRAL
from shoal.backend.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from shoal.backend.models.family import Family, GgufForm
from shoal.backend.models.gguf_config import GgufDescription
from shoal.backend.models.hf_config import token_ids
from shoal.backend.models.model_config import ModelConfig

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (LLAMA, SMOLLM3, MISTRAL, QWEN2, QWEN3, GEMMA3, GEMMA4, QWEN3_MOE, MIXTRAL)
}
_HF_READERS = {
    architecture: read for family in FAMILIES.values() for architecture, read in family.hf.items()
}
_GGUF_FORMS = {
    architecture: form for family in FAMILIES.values() for architecture, form in family.gguf.items()
}


def hf_architectures() -> tuple[str, ...]:
    """The architectures of config.json that can run."""
    return tuple(_HF_READERS)


def gguf_architectures() -> tuple[str, ...]:
    """The architectures of GGUF files that can run."""
    return tuple(_GGUF_FORMS)


def config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> AnyConfig:
    """Read a decoded ``config.json``; EOS ids come from ``generation_config.json`` as well.

    Raises ConfigError, naming the field, or saying which architectures can run.
    """
    known = ", ".join(_HF_READERS)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"architectures is missing. Supported: {known}.")
    read = _HF_READERS.get(architectures[0]) if isinstance(architectures[0], str) else None
    if read is None:
        raise ConfigError(
            f"architecture {architectures[0]!r:.64} is not supported. Supported: {known}."
        )
    if config.get("quantization_config") is not None:
        raise ConfigError("quantization_config: quantised safetensors are not supported; use GGUF.")
    text = config.get("text_config")  # of a model that sees images too
    configs = (config, text if isinstance(text, Mapping) else {}, generation_config or {})
    return replace(read(config), eos_token_ids=token_ids(*configs))


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """Read GGUF metadata. What it leaves out (biases, a head of its own) the tensors tell.

    ``rope_factors`` are the values of the tensor rope_freqs.weight where the file has one. Raises
    ConfigError, naming the field, or saying which architectures can run.
    """
    form = gguf_form(metadata)
    if or_default(metadata, "split.count", 1) > 1:
        raise ConfigError("split.count: merge the parts of a split GGUF into one file first.")
    return form.read(GgufDescription(metadata, tensor_names, rope_factors))


def gguf_form(metadata: Mapping[str, Any]) -> GgufForm:
    """How a file's architecture is laid out. Raises ConfigError for one that cannot run."""
    architecture = required(metadata, "general.architecture")
    form = _GGUF_FORMS.get(architecture)
    if form is None:
        raise ConfigError(
            f"architecture {architecture!r} is not supported. Supported: {', '.join(_GGUF_FORMS)}."
        )
    return form
