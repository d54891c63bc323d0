"""Any decoder-only model of transformers over our paged cache: slower than ours, not refused.

The one place where transformers runs a forward pass. Code that comes with a checkpoint is never
run.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import torch

from shoal.backend.engine_config import ConfigError
from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_layout import KVLayout, LayerKV
from shoal.backend.models import transformers_attention
from shoal.backend.models.config_values import check_int
from shoal.backend.models.hf_config import FULL, SLIDING, token_ids
from shoal.backend.models.model_config import SIZE_LIMITS
from shoal.backend.models.transformers_attention import Examination, Step, attending
from shoal.backend.models.transformers_config import TransformersConfig

# What a rotation may depend on beside a token's own position.
_ROPES_OF_THE_LONGEST = ("dynamic", "longrope")


class TransformersModel:
    """The model with its weights, for inference. ``forward`` mutates nothing but the cache."""

    def __init__(self, model: Any, config: TransformersConfig) -> None:
        self.config = config
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._selects_rows = "logits_to_keep" in parameters

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        """Run the batch, writing its keys and values to ``kv``.

        Returns float32 logits [num_samples, vocab_size] of the rows ``batch.logits_indices``.
        """
        options: dict[str, Any] = (
            {"logits_to_keep": batch.logits_indices} if self._selects_rows else {}
        )
        if batch.hidden is not None:
            options["output_hidden_states"] = True
        with attending(Step.of(batch, kv)):
            output = self._model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **options,
            )
        if batch.hidden is not None:
            batch.hidden.states = output.hidden_states[-1][0][batch.logits_indices].float()
        logits: torch.Tensor = output.logits[0].float()
        return logits if self._selects_rows else logits[batch.logits_indices]


def load_through_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> TransformersModel:
    """Load a checkpoint folder with safetensors.

    Raises ConfigError, with the reason, for what this way cannot run either.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder.name}: runner transformers needs a folder with config.json and safetensors."
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            "runner transformers needs the Python package transformers, version 5 or newer: "
            "pip install 'transformers>=5'."
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = _read_config(folder, transformers)
    _refuse(config, transformers)
    model = _load(folder, config, dtype, transformers).to(device).eval().requires_grad_(False)
    try:
        return TransformersModel(model, _describe(model, folder))
    except ConfigError as error:
        raise _cannot_run(config.model_type, str(error)) from error


def _cannot_run(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{name!r} cannot run through transformers: {reason}. What can: decoder-only models that "
        "transformers knows itself, with causal attention in every layer and no other state."
    )


def _read_config(folder: Path, transformers: Any) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = str(values.get("model_type", "this model"))[:64]
        if "auto_map" in values:
            reason = "it needs code that comes with the checkpoint, which is never run"
        else:
            reason = _first_line(error)
        raise _cannot_run(name, reason) from error


def _refuse(config: Any, transformers: Any) -> None:
    """Raise ConfigError for what the config alone shows."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise _cannot_run(name, "it is an encoder-decoder model")
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise _cannot_run(name, "it is no causal language model")
    if getattr(config, "quantization_config", None) is not None:
        raise _cannot_run(name, "its weights are quantised")
    text = config.get_text_config()
    for kind in set(getattr(text, "layer_types", None) or ()):
        if kind not in (FULL, SLIDING):
            raise _cannot_run(name, f"it has layers of the kind {kind}")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in _ROPES_OF_THE_LONGEST:
            raise _cannot_run(
                name,
                f"its rotations ({rope['rope_type']}) depend on the longest sequence of a batch",
            )


def _load(folder: Path, config: Any, dtype: torch.dtype, transformers: Any) -> Any:
    transformers.AttentionInterface.register(
        transformers_attention.NAME, transformers_attention.attend
    )
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=transformers_attention.NAME,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
        )
    except KeyError as error:
        raise _cannot_run(config.model_type, "its attention cannot be replaced") from error
    except Exception as error:
        raise _cannot_run(config.model_type, _first_line(error)) from error


def _describe(model: Any, folder: Path) -> TransformersConfig:
    """Run one token and see what each layer keeps. Raises ConfigError with the bare reason."""
    if getattr(model, "_is_stateful", False):
        raise ConfigError("it keeps a state beside keys and values")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError("it does not take the tokens' positions")
    text = model.config.get_text_config()
    layers = _examine(model, text.num_hidden_layers)
    _check_windows(model, layers)
    generation = folder / "generation_config.json"
    generation_config = json.loads(generation.read_text("utf-8")) if generation.is_file() else {}
    eos_ids = token_ids(text.to_dict(), generation_config)
    vocab_size = check_int("vocab_size", text.vocab_size, 1, SIZE_LIMITS["vocab_size"])
    return TransformersConfig(
        family=model.config.model_type,
        vocab_size=vocab_size,
        kv_layout=KVLayout.of(layers),
        max_position_embeddings=check_int(
            "max_position_embeddings",
            getattr(text, "max_position_embeddings", 2048),
            1,
            SIZE_LIMITS["max_position_embeddings"],
        ),
        bos_token_id=text.bos_token_id,
        eos_token_ids=tuple(idx for idx in eos_ids if idx < vocab_size),
        hidden_size=getattr(text, "hidden_size", None) or 0,
    )


@torch.inference_mode()
def _examine(model: Any, num_layers: int) -> list[LayerKV]:
    examination = Examination()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with attending(examination):
            model(input_ids=token, position_ids=token, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"its attention cannot be replaced ({_first_line(error)})") from error
    if sorted(examination.layers) != list(range(num_layers)):
        raise ConfigError(
            f"only {len(examination.layers)} of its {num_layers} layers let their attention be "
            "replaced"
        )
    return [examination.layers[idx] for idx in range(num_layers)]


def _check_windows(model: Any, layers: list[LayerKV]) -> None:
    """transformers' own cache must agree on which layers slide, and how far."""
    from transformers.cache_utils import DynamicCache

    for idx, cached in enumerate(DynamicCache(config=model.config).layers):
        window = getattr(cached, "sliding_window", None)
        if idx < len(layers) and layers[idx].window != window:
            raise ConfigError(f"layer {idx} does not say how far it sees")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
