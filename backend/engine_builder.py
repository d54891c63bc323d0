"""From settings to an engine that is ready to step."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.backend.cost_probe import measure_pace
from shoal.backend.engine import Engine, EngineLimits
from shoal.backend.engine_config import ConfigError, EngineConfig
from shoal.backend.grammar_compiler import GrammarCompiler
from shoal.backend.grammar_gate import GrammarGate
from shoal.backend.grammar_matcher import GrammarMatchers
from shoal.backend.image_store import ImageStore
from shoal.backend.kv_cache import PagedKVCache, bytes_per_block
from shoal.backend.kv_layout import KVLayout
from shoal.backend.kv_sizing import KVSize, size_kv_cache
from shoal.backend.kv_tiers import build_kv_tiers
from shoal.backend.machine import available_memory, freeing_at_once, num_usable_cpus
from shoal.backend.memory_watch import make_memory_watch
from shoal.backend.messages import WorkerReady
from shoal.backend.model_runner import Model, ModelRunner
from shoal.backend.models.any_config import ServedConfig
from shoal.backend.models.native import NativeModel, make_native
from shoal.backend.models.transformers_model import TransformersModel
from shoal.backend.models.vision import Vision, load_vision
from shoal.backend.pressure_guard import PressureGuard
from shoal.backend.prompt_ends import KnownEnds
from shoal.backend.runners import (
    FoundWeights,
    ServedModel,
    ServedWeights,
    find_weights,
    load_with_runner,
)
from shoal.backend.self_test import test_at_start
from shoal.backend.step_log import StepLog
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import kernels_dir, resolve_weights
from shoal.kernels.native_build import NativeBuildError
from shoal.kernels.native_library import NativeLibrary, load_native
from shoal.scheduler.block_pool import BlockPool
from shoal.scheduler.eviction import make_eviction_policy
from shoal.scheduler.host_tier import HostTier
from shoal.scheduler.kv_manager import KVCacheManager
from shoal.scheduler.outputs import ScheduledSequence, SchedulerOutput
from shoal.scheduler.prefix_tree import PrefixTree
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.scheduler import Scheduler, SchedulerConfig
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.window_blocks import WindowBlocks

logger = logging.getLogger(__name__)

# Called with a phase, and bytes done and in all (0 where a phase has none).
Progress = Callable[[str, int, int], None]


def build_engine(config: EngineConfig, progress: Progress) -> tuple[GrammarGate, WorkerReady]:
    """Load the model, allocate the KV cache and run a first step.

    Raises ConfigError for what an operator can mend. Sets the process's number of torch threads.
    """
    torch.set_num_threads(config.num_threads or num_usable_cpus())
    step_log = StepLog(Path(config.step_log)) if config.step_log else None
    device = choose_device(config.device)
    native = choose_kernels(config.kernels, device, progress)
    found = find_weights(config)
    native = _able(native, found, config)
    dtype = choose_dtype(config.dtype, native)
    with freeing_at_once():
        loaded = load_with_runner(config, found, dtype, device, progress)
        del found  # with it goes a mapped file
        model = _on_kernels(loaded.model, native, progress)
        vision = _load_vision(config, loaded, native, dtype, device)
    images = ImageStore(vision) if vision is not None else None
    progress("kv cache", 0, 0)
    reads_panels = native is not None and native.has_bf16 and dtype == torch.bfloat16
    size, kv_cache = _make_kv_cache(config, loaded.config, dtype, device, reads_panels)
    progress("first step", 0, 0)
    probe = ModelRunner(model, kv_cache, device)
    _run_first_step(probe, len(size.cache_blocks))
    computed_by = f"{native.instructions if native else 'reference'} {loaded.runner} {dtype}"
    tiers = build_kv_tiers(config, loaded.config, kv_cache, probe, computed_by)
    mover = tiers.mover if tiers else None
    host_kv_bytes = tiers.host_kv_bytes if tiers else 0
    memory = make_memory_watch(device, config.memory_ceiling_mib, host_kv_bytes)
    guard = PressureGuard(memory, config.max_num_batched_tokens)
    compiler = GrammarCompiler(
        lambda: Tokenizer.from_checkpoint(resolve_weights(config.weights)),
        loaded.config.vocab_size,
        loaded.config.eos_token_ids,
    )
    grammars = GrammarMatchers(
        compiler, 2 * config.max_num_seqs, num_threads=torch.get_num_threads()
    )
    runner = ModelRunner(
        model,
        kv_cache,
        device,
        guard,
        mover,
        grammars=grammars,
        native=native,
        images=images,
        ends=_known_ends(config, model),
    )
    parity = test_at_start(config, model, kv_cache, dtype, native is not None, progress)
    ready = WorkerReady(
        num_blocks=size.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=size.max_model_len,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=list(loaded.config.eos_token_ids),
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        kernels="native" if native else "reference",
        runner=loaded.runner,
        max_num_batched_tokens=config.max_num_batched_tokens,
        parity=parity,
        images=vision.form if vision is not None else None,
        hidden_size=loaded.config.hidden_size,
    )
    host = tiers.host if tiers else None
    scheduler = _make_scheduler(config, size, loaded.config.kv_layout, host)
    scheduler.pace = measure_pace(probe, kv_cache, size.max_model_len)
    engine = Engine(scheduler, runner, _limits(ready), step_log, guard, mover, images)
    return GrammarGate(engine, compiler), ready


def choose_device(name: str) -> torch.device:
    """``auto``: the best there is. Raises ConfigError for one that is not here."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, here in present.items() if here)
    if not present[name]:
        usable = ", ".join(kind for kind, here in present.items() if here)
        raise ConfigError(f"device {name} is not usable on this machine. Usable: {usable}, auto.")
    return torch.device(name)


def choose_dtype(name: str, native: NativeLibrary | None) -> torch.dtype:
    """``auto``: bfloat16 where the native kernels run the model and compute in it, else float32.

    The native kernels give a text that depends on nothing else in either; without them float32 is
    what keeps it the most stable.
    """
    if name == "auto":
        name = "bfloat16" if native is not None and native.has_bf16 else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What the KV cache holds; ``auto``: the model's dtype."""
    stored = {
        "auto": dtype,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "int8": torch.int8,
    }[name]
    if stored == torch.float32 and dtype != torch.float32:
        raise ConfigError(
            "kv_dtype float32 needs a model in float32: set dtype to float32, or kv_dtype to auto."
        )
    return stored


def choose_kernels(name: str, device: torch.device, progress: Progress) -> NativeLibrary | None:
    """The native kernels, or None for the reference. Raises ConfigError where ``native`` was asked
    for and cannot be had; with ``auto`` the log says why not."""
    if name == "reference" or (name == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise ConfigError(f"kernels: native runs on the CPU only, not on {device.type}.")
    try:
        library = load_native(kernels_dir(), lambda phase: progress(phase, 0, 0))
    except NativeBuildError as error:
        if name == "native":
            raise ConfigError(f"kernels: native cannot be had: {error}.") from error
        logger.warning(
            "The torch reference computes instead of the native kernels: it is slower, and a text "
            "can depend on what else runs. Reason: %s.",
            error,
        )
        return None
    logger.info("native kernels: %s", library.instructions)
    return library


def _able(
    native: NativeLibrary | None, found: FoundWeights, config: EngineConfig
) -> NativeLibrary | None:
    """The native kernels if they can run this model. Asked before the weights are loaded, as their
    dtype depends on it."""
    missing = found.missing_ops(config.quantization) if native else None
    if native is not None and missing is None and config.images and found.sees_images:
        missing = "images among a prompt's tokens (images: false runs its text)"
    if missing is None:
        return native
    if config.kernels == "native":
        raise ConfigError(
            f"kernels: native cannot run {found.path.name}: no {missing}. Set kernels to auto."
        )
    logger.warning(
        "The torch reference computes instead of the native kernels, which cannot run %s: no %s. "
        "It is slower, and a text can depend on what else runs.",
        found.path.name,
        missing,
    )
    return None


def _known_ends(config: EngineConfig, model: Model) -> KnownEnds | None:
    """For models whose rows depend on their own tokens alone."""
    if not config.prefix_caching or not isinstance(model, NativeModel):
        return None
    return KnownEnds(model.head)


def _on_kernels(model: ServedModel, native: NativeLibrary | None, progress: Progress) -> Model:
    if native is None or isinstance(model, TransformersModel):
        return model
    progress("packing weights", 0, 0)
    return make_native(model, native)


def _load_vision(
    config: EngineConfig,
    loaded: ServedWeights,
    native: NativeLibrary | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Vision | None:
    """What sees images, where the model has it and can use it; the log says why not."""
    if config.images is False or isinstance(loaded.model, TransformersModel):
        return None
    if loaded.config.image_token_id is None:
        return None
    vision, reason = None, "the native kernels run its text alone; set images: true for both"
    if native is None:
        vision, reason = load_vision(resolve_weights(config.weights), loaded.config, dtype, device)
    if vision is not None and vision.form.both_ways:
        num_tokens = vision.form.max_tokens
        if num_tokens > config.max_num_batched_tokens:
            vision = None
            reason = f"max_num_batched_tokens must be at least {num_tokens} for this model's images"
    if reason is not None:
        logger.warning("This model sees images, but they are refused: %s.", reason)
    return vision


def _make_kv_cache(
    config: EngineConfig,
    model: ServedConfig,
    dtype: torch.dtype,
    device: torch.device,
    key_panels: bool,
) -> tuple[KVSize, PagedKVCache]:
    layout = model.kv_layout
    stored = choose_kv_dtype(config.kv_dtype, dtype)
    size = size_kv_cache(
        config,
        bytes_per_block(layout, config.block_size, stored),
        model.max_position_embeddings,
        available_memory(device),
        layout.windows,
    )
    cache = PagedKVCache(layout, size.cache_blocks, config.block_size, stored, device, key_panels)
    return size, cache


def _make_scheduler(
    config: EngineConfig, size: KVSize, layout: KVLayout, host: HostTier | None
) -> Scheduler:
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        decode_stretch=config.decode_stretch,
    )
    tree = _make_prefix_tree(config, size.num_blocks, host) if config.prefix_caching else None
    windows = [
        WindowBlocks(BlockPool(num_blocks, config.block_size, first_id=1), window, group)
        for group, (window, num_blocks) in enumerate(
            zip(layout.windows, size.window_blocks, strict=True), start=1
        )
    ]
    pool = BlockPool(size.num_blocks, config.block_size)
    return Scheduler(limits, KVCacheManager(pool, tree, windows, host))


def _make_prefix_tree(config: EngineConfig, num_blocks: int, host: HostTier | None) -> PrefixTree:
    policy = make_eviction_policy(config.prefix_eviction, num_blocks)
    on_demote = host.demote if host else None
    return PrefixTree(config.block_size, policy, time.monotonic, on_demote)


def _limits(ready: WorkerReady) -> EngineLimits:
    return EngineLimits(ready.vocab_size, ready.max_model_len, frozenset(ready.eos_token_ids))


def _run_first_step(runner: ModelRunner, num_groups: int) -> None:
    """Prove that the model runs, and let libraries set themselves up, before anyone waits.

    It writes to a block that nobody holds yet; whoever gets it overwrites what it reads.
    """
    sequence = Sequence(
        0, [0], 1, SamplingParams(temperature=0.0, max_tokens=1), block_tables=[[0]] * num_groups
    )
    result = runner.run(SchedulerOutput((ScheduledSequence(sequence, 1),)))
    if result.failed:
        raise RuntimeError(f"the first step failed: {result.failed[0]}")
