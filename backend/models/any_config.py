"""The shape of whatever model can run, without torch."""

from shoal.backend.models.gemma4_config import Gemma4Config
from shoal.backend.models.model_config import ModelConfig

# Of a model of ours. Both give vocab_size, kv_layout, max_position_embeddings, tie_word_embeddings,
# bos_token_id, eos_token_ids and family.
AnyConfig = ModelConfig | Gemma4Config
