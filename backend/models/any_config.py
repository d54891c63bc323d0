"""The shape of whatever model can run, without torch."""

from shoal.backend.models.gemma4_config import Gemma4Config
from shoal.backend.models.model_config import ModelConfig
from shoal.backend.models.transformers_config import TransformersConfig

# Of a model of ours. Each gives vocab_size, kv_layout, max_position_embeddings, bos_token_id,
# eos_token_ids and family.
AnyConfig = ModelConfig | Gemma4Config

# Of a model that any runner runs.
ServedConfig = AnyConfig | TransformersConfig
