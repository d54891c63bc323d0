"""From a model's shape to the model: which class runs it, and which tensors it takes."""

from collections.abc import MutableMapping

from shoal.backend.models import gemma4_weights
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.gemma4 import Gemma4ForCausalLM
from shoal.backend.models.gemma4_config import Gemma4Config
from shoal.kernels.quantized_weights import Weight

# Of checkpoints that see images; `vision` reads them.
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")

AnyModel = Decoder | Gemma4ForCausalLM


def weight_shapes(config: AnyConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model must hold, by its name in safetensors."""
    if isinstance(config, Gemma4Config):
        return gemma4_weights.weight_shapes(config)
    return Decoder.weight_shapes(config)


def is_unneeded(name: str, config: AnyConfig) -> bool:
    """Whether a checkpoint may hold a tensor of this name though the model does not take it."""
    if isinstance(config, Gemma4Config):
        return gemma4_weights.is_unneeded(name, config)
    tied_head = config.tie_word_embeddings and name == config.head_name
    if config.image_token_id is not None and name.startswith(IMAGE_PARTS):
        return True
    return tied_head or name.endswith("rotary_emb.inv_freq")


def build_model(config: AnyConfig, tensors: MutableMapping[str, Weight]) -> AnyModel:
    """The model over the tensors that ``weight_shapes`` names; it takes them out of ``tensors``."""
    if isinstance(config, Gemma4Config):
        return Gemma4ForCausalLM(config, tensors)
    return Decoder(config, tensors)
