"""One long session by the real scheduler and kernels, its prompt scored token by token."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shoal.backend.engine_builder import choose_dtype, choose_kernels
from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.model_runner import Model, ModelRunner
from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.native import make_native
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import resolve_weights
from shoal.backend.weights.loader import load_model
from shoal.scheduler.block_pool import BlockPool
from shoal.scheduler.kv_manager import KVCacheManager
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.scheduler import Scheduler, SchedulerConfig
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.session_eviction import SessionEviction

BLOCK_SIZE = 16
CPU = torch.device("cpu")

MakeEviction = Callable[[], SessionEviction | None]


@dataclass(frozen=True, slots=True)
class LoadedSessions:
    """A model, ready for one session after the other."""

    model: Model
    config: AnyConfig
    dtype: torch.dtype
    tokenizer: Tokenizer
    kernels: str


@dataclass(frozen=True, slots=True)
class SessionRun:
    """What came of a session."""

    nll: list[float]  # of each prompt token but the first, in nats
    output: list[int]
    held: list[tuple[int, int]]  # after each step: computed tokens, blocks held
    seconds: float


@dataclass(slots=True)
class _ScoredModel:
    """Asks the model for the logits of all rows, and notes how well they foretold the prompt."""

    model: Model
    prompt: list[int]
    nll: list[float] = field(default_factory=list)

    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        rows = torch.arange(len(batch.input_ids))
        logits = self.model.forward(replace(batch, logits_indices=rows, likeliest=None), kv)
        following = batch.positions + 1
        known = following < len(self.prompt)
        targets = torch.tensor(self.prompt)[following[known]]
        nll = torch.nn.functional.cross_entropy(logits[known], targets, reduction="none")
        self.nll += nll.tolist()
        return logits[batch.logits_indices]


def load(weights: str, dtype: str) -> LoadedSessions:
    """The model on the native kernels where they can be had."""
    path: Path = resolve_weights(weights)
    native = choose_kernels("auto", CPU, lambda *_: None)
    chosen = choose_dtype(dtype, native)
    loaded = load_model(path, chosen)
    model: Model = loaded.model
    if native is not None:
        model = make_native(loaded.model, native)
    kernels = "reference" if native is None else "native"
    return LoadedSessions(model, loaded.config, chosen, Tokenizer.from_checkpoint(path), kernels)


def run_session(
    loaded: LoadedSessions,
    prompt: list[int],
    make_eviction: MakeEviction,
    *,
    max_len: int,
    sampling: SamplingParams,
    chunk: int = 512,
) -> SessionRun:
    """Run a prompt and its outputs, alone, under an eviction policy (None: all stays).

    A prompt comes in chunks of at most ``chunk`` tokens. Since evictions happen at fixed positions,
    its scores are those of a session that comes token by token.
    """
    num_blocks = -(-max_len // BLOCK_SIZE)
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    limits = SchedulerConfig(1, chunk, max_len)
    scheduler = Scheduler(limits, KVCacheManager(pool))
    layout = loaded.config.kv_layout
    cache = PagedKVCache(layout, [num_blocks] * len(layout.groups), BLOCK_SIZE, loaded.dtype)
    model = _ScoredModel(loaded.model, prompt)
    runner = ModelRunner(model, cache, CPU)
    sequence = Sequence(0, list(prompt), len(prompt), sampling)
    scheduler.add(sequence)
    sequence.eviction = make_eviction()  # also one that no request can ask for
    held = []
    start = time.perf_counter()
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        held.append((sequence.num_computed_tokens + step.num_tokens, num_blocks - pool.num_free))
        result = runner.run(step)
        scheduler.update_from_output(
            step, result.sampled, result.failed, block_mass=result.block_mass
        )
    seconds = time.perf_counter() - start
    return SessionRun(model.nll, sequence.token_ids[len(prompt) :], held, seconds)
