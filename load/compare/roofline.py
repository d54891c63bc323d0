"""How fast a model could run at best on a machine: bytes against bandwidth, products against peak.

A step takes at least max(bytes / bandwidth, operations / peak), a run the sum over its steps.
Bytes: every weight once at its bits (16, 8 or 4, nothing for scales), the keys and values that are
read, and those written. Operations: two for each weight and token, of the output projection only
for tokens that are sampled, and four for each element of each query and key pair. Activations,
norms, rotations and sampling are free. Int8 and int4 are held against the peak of int8 products.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}
KV_BYTES = 2


@dataclass(frozen=True, slots=True)
class Peaks:
    """What bounds a step. Bytes and operations a second."""

    read: float
    product: float


@dataclass(frozen=True, slots=True)
class Run:
    """A sequence's part of a step: ``num_tokens`` new ones after ``num_computed``."""

    num_tokens: int
    num_computed: int
    samples: bool = True


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a decoder decides its cost."""

    layer_weights: int  # of products, all layers together
    output_weights: int  # of the projection to logits
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]  # by layer; None: all of the context

    @classmethod
    def of_checkpoint(cls, folder: Path) -> "ModelShape":
        """From ``config.json`` of a Llama-like model with gated MLPs."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        hidden = config["hidden_size"]
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads") or heads
        size = config.get("head_dim") or hidden // heads
        attention = hidden * size * (2 * heads + 2 * kv_heads)
        kinds = config.get("layer_types") or ["full_attention"] * layers
        window = config.get("sliding_window")
        return cls(
            layer_weights=layers * (attention + 3 * hidden * config["intermediate_size"]),
            output_weights=hidden * config["vocab_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        )

    def step_seconds(self, runs: Iterable[Run], bits: str, peaks: Peaks) -> float:
        """The least that a step of these sequences can take."""
        tokens = samples = pairs = keys = 0
        for run in runs:
            tokens += run.num_tokens
            samples += run.samples
            pairs += self._pairs(run)
            keys += self._keys(run)
        weights = self.layer_weights + (self.output_weights if samples else 0)
        entry = 2 * self.num_kv_heads * self.head_size * KV_BYTES  # of a token in a layer
        num_bytes = weights * WEIGHT_BYTES[bits]
        num_bytes += entry * (keys + tokens * len(self.windows))
        products = 2 * (self.layer_weights * tokens + self.output_weights * samples)
        attention = 4 * self.num_heads * self.head_size * pairs
        return max(num_bytes / peaks.read, (products + attention) / peaks.product)

    def _pairs(self, run: Run) -> int:
        """Query and key pairs, summed over the layers."""
        return sum(
            min(run.num_computed + idx + 1, window or 2**62)
            for idx in range(run.num_tokens)
            for window in self.windows
        )

    def _keys(self, run: Run) -> int:
        """Keys read from the cache, summed over the layers: those of earlier steps."""
        return sum(min(run.num_computed, window or 2**62) for window in self.windows)


def best_tokens_per_s(
    shape: ModelShape, bits: str, peaks: Peaks, streams: int, lengths: tuple[int, int]
) -> float:
    """Output tokens a second of a closed loop at the roofline.

    All streams' prompts run in one step, then each step decodes all: no order of the same work
    takes less, as a prefill is bound by products, and decodes share their read of the weights.
    ``lengths``: tokens of prompt and answer.
    """
    num_prompt, num_outputs = lengths
    seconds = shape.step_seconds([Run(num_prompt, 0)] * streams, bits, peaks)
    for context in range(num_prompt, num_prompt + num_outputs - 1):
        seconds += shape.step_seconds([Run(1, context)] * streams, bits, peaks)
    return streams * num_outputs / seconds
