"""A whole engine over a tiny Llama that transformers has written."""

from pathlib import Path
from typing import Any

import torch
from builders import make_scheduler
from tiny_runs import BLOCK_SIZE, CPU, make_kv_cache
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.backend.engine import Engine, EngineLimits
from shoal.backend.messages import AddSequence
from shoal.backend.model_runner import ModelRunner
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.models.transformers_model import load_through_transformers
from shoal.backend.weights.catalogue import kernels_dir
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import load_native
from shoal.scheduler.eviction import make_eviction_policy
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.sampling_params import SamplingParams

RUNNERS = ("reference", "native", "transformers")


def write_tiny_llama(folder: Path) -> Path:
    """The same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class TinyEngine:
    """An engine over a checkpoint, with a prefix cache and whatever the scheduler is told else."""

    def __init__(self, folder: Path, runner: str = "reference", **scheduler: Any) -> None:
        loaded = load_model(folder, torch.float32, CPU, lambda *_: None)
        model: Any = loaded.model
        if runner == "native":
            model = NativeDecoder(model, load_native(kernels_dir()))
        elif runner == "transformers":
            model = load_through_transformers(folder, torch.float32)
        options = {"block_size": BLOCK_SIZE, "prefix_eviction": make_eviction_policy("lru", 64)}
        self.scheduler = make_scheduler(**{**options, **scheduler})
        cache = make_kv_cache(loaded.config.kv_layout, self.scheduler)
        limits = EngineLimits(loaded.config.vocab_size, 200, frozenset())
        self.engine = Engine(self.scheduler, ModelRunner(model, cache, CPU), limits)

    def add(self, seq_id: int, prompt: list[int], **sampling: Any) -> None:
        """Greedy and two tokens long unless told otherwise; an embedding has none."""
        length = 0 if "pooling" in sampling else 2
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": length, **sampling})
        self.engine.add(AddSequence(seq_id, list(prompt), len(prompt), params))

    def run(self) -> dict[int, list[StepOutput]]:
        """To the end of all; each sequence's outputs."""
        outputs: dict[int, list[StepOutput]] = {}
        while self.engine.has_unfinished:
            for output in self.engine.step():
                outputs.setdefault(output.seq_id, []).append(output)
            self.scheduler.check_integrity()
        return outputs
