"""The shape of a model that runs through transformers; without torch and without transformers."""

from dataclasses import dataclass

from shoal.backend.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """What the engine needs to know of it. Read off the loaded model."""

    family: str  # transformers' model_type
    vocab_size: int
    kv_layout: KVLayout
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    hidden_size: int = 0  # 0: it does not say
