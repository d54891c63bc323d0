"""Compares the loaded model with transformers' own run of the same weights, at start-up.

transformers is imported here only, and only when the test is asked for. For its time a second copy
of the weights is in memory.
"""

import gc
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.backend.engine_config import EngineConfig
from shoal.backend.forward_batch import ForwardBatch
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.messages import ParityReport
from shoal.backend.model_runner import build_forward_batch
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import resolve_weights
from shoal.scheduler.outputs import ScheduledSequence
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 40, 8
# How far logits may lie from transformers', in standard deviations of their row; a greedy token may
# differ where the two best lie nearer than that.
TOLERANCES = {"float32": 0.002, "bfloat16": 0.3, "int8": 0.5, "fp8": 0.5, "int4": 1.0}
_PACKED = ("int8", "fp8", "int4")

_SENTENCES = (
    "The tide came in slowly, and the small boats rose with it one after another.",
    "Write a function that returns the first repeated element of a list.",
    "In 1815 the harbour held 212 ships, 47 of them from the north.",
    "Why is the sky blue at noon and red in the evening?",
    "Erkläre mir bitte kurz, wie ein Kompass funktioniert.",
    "def area(width, height):\n    return width * height\n",
    "List three fruits, three tools and three rivers.",
    "She opened the letter, read it twice, and laid it back on the table without a word.",
)


class Model(Protocol):
    """What is tested."""

    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """A model ready to run, with a cache that nobody uses yet."""

    model: Model
    kv_cache: PagedKVCache
    weights: Path
    encode: Callable[[str], list[int]]
    tolerance: float  # a value of TOLERANCES
    # What transformers computes in: the same type where bits can be equal, else float32.
    reference_dtype: torch.dtype


def test_at_start(
    config: EngineConfig,
    model: Model,
    kv_cache: PagedKVCache,
    dtype: torch.dtype,
    is_native: bool,
    progress: Callable[[str, int, int], None],
) -> ParityReport | None:
    """The test that the settings ask for, of a model that serves nobody yet."""
    if not config.self_test:
        return None
    weights = resolve_weights(config.weights)
    # By what rounds the most.
    kinds = (config.quantization, config.kv_dtype, str(dtype).removeprefix("torch."))
    is_packed = any(kind in _PACKED for kind in kinds)
    subject = Subject(
        model,
        kv_cache,
        weights,
        lambda text: Tokenizer.from_checkpoint(weights).encode(text, add_bos=True),
        tolerance=max(TOLERANCES[kind] for kind in kinds if kind in TOLERANCES),
        reference_dtype=torch.float32 if is_native or is_packed else dtype,
    )
    return run_self_test(subject, config.self_test, progress)


@dataclass(slots=True)
class _Tally:
    num_rows: int = 0
    num_equal: int = 0
    num_wrong: int = 0
    worst: float = 0.0  # standard deviations


def run_self_test(
    subject: Subject, num_prompts: int, progress: Callable[[str, int, int], None]
) -> ParityReport:
    """Run ``num_prompts`` prompts of ours and transformers' side by side. Raises nothing: what
    keeps the test from running is told in the report."""
    progress("self-test: loading transformers", 0, 0)
    try:
        theirs = _load_theirs(subject)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return _told(ParityReport(ok=None, detail=f"not run: {lines[0][:200]}"))
    tally = _Tally()
    try:
        for idx in range(num_prompts):
            progress(f"self-test: prompt {idx + 1} of {num_prompts}", 0, 0)
            _compare(subject, theirs, _prompt(subject, idx), tally)
    except Exception as error:
        logger.exception("the self-test failed")
        return _told(ParityReport(ok=False, detail=f"failed: {error!r}"[:300]))
    finally:
        del theirs
        gc.collect()
    return _told(
        ParityReport(
            ok=tally.num_wrong == 0 and tally.worst <= subject.tolerance,
            num_prompts=num_prompts,
            num_tokens=tally.num_rows,
            num_equal=tally.num_equal,
            num_wrong=tally.num_wrong,
            worst_difference=tally.worst,
            tolerance=subject.tolerance,
        )
    )


def _told(report: ParityReport) -> ParityReport:
    if report.ok is None:
        logger.warning("self-test %s", report.detail)
    else:
        level = logging.INFO if report.ok else logging.ERROR
        logger.log(
            level,
            "self-test %s: %d of %d rows of logits equal transformers' bit for bit, %d greedy "
            "tokens wrong, worst difference %.2g standard deviations (at most %.2g allowed) %s",
            "passed" if report.ok else "FAILED",
            report.num_equal,
            report.num_tokens,
            report.num_wrong,
            report.worst_difference,
            report.tolerance,
            report.detail,
        )
    return report


def _load_theirs(subject: Subject) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise RuntimeError("transformers is not installed") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = subject.weights
    options: dict[str, Any] = {"dtype": subject.reference_dtype, "local_files_only": True}
    if path.suffix == ".gguf":
        path, options["gguf_file"] = path.parent, path.name
    else:
        options |= {"trust_remote_code": False, "use_safetensors": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    for tensor in (*model.parameters(), *model.buffers()):
        # A mapped file's tensors begin anywhere, and from there a product may round otherwise.
        tensor.data = tensor.data.clone()
    return model.to(subject.kv_cache.device).eval()


def _prompt(subject: Subject, idx: int) -> list[int]:
    """As many tokens as fit; no two prompts below the square of the sentences' number are alike."""
    count = len(_SENTENCES)
    text = f"{_SENTENCES[idx % count]} {_SENTENCES[(idx // count + idx + 1) % count]}"
    room = subject.kv_cache.num_blocks[0] * subject.kv_cache.block_size - NUM_OUTPUT_TOKENS
    return subject.encode(text)[: max(1, min(NUM_PROMPT_TOKENS - idx % 7, room))]


@torch.inference_mode()
def _compare(subject: Subject, theirs: Any, prompt: list[int], tally: _Tally) -> None:
    """The prompt at once, then token by token; both sides follow transformers' greedy text."""
    sequence = _sequence(subject.kv_cache, prompt)
    # transformers 5.40 knows the second name no more, 5.0 not yet the first.
    names = inspect.signature(theirs.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    last_row = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    cache, new_ids = None, prompt
    for _ in range(NUM_OUTPUT_TOKENS):
        output = theirs(
            torch.tensor([new_ids], device=subject.kv_cache.device),
            use_cache=True,
            **{cache_name: cache, **last_row},
        )
        cache, expected = output[cache_name], output.logits[0, -1].float()
        item = ScheduledSequence(sequence, len(new_ids))
        batch = build_forward_batch([item], subject.kv_cache.block_size, subject.kv_cache.device)
        logits = subject.model.forward(batch, subject.kv_cache)[0]
        _judge(logits.to(expected.device), expected, subject.tolerance, tally)
        sequence.num_computed_tokens += len(new_ids)
        new_ids = [int(expected.argmax())]
        sequence.token_ids.append(new_ids[0])


def _sequence(kv: PagedKVCache, prompt: list[int]) -> Sequence:
    """Over the first blocks; of windowed groups block 0 belongs to nobody."""
    count = -(-(len(prompt) + NUM_OUTPUT_TOKENS) // kv.block_size)
    tables = [
        [min(first + idx, num_blocks - 1) for idx in range(count)]
        for first, num_blocks in zip(
            [0] + [1] * (len(kv.num_blocks) - 1), kv.num_blocks, strict=True
        )
    ]
    return Sequence(0, list(prompt), len(prompt), SamplingParams(), block_tables=tables)


def _judge(logits: torch.Tensor, expected: torch.Tensor, tolerance: float, tally: _Tally) -> None:
    # A vocabulary may be padded on one side.
    width = min(len(logits), len(expected))
    logits, expected = logits[:width], expected[:width]
    spread = float(expected.std())
    difference = float((logits - expected).abs().max()) / spread
    best = expected.topk(2).values
    gap = float(best[0] - best[1]) / spread
    tally.num_rows += 1
    tally.num_equal += torch.equal(logits, expected)
    # NaN is the worst of differences.
    tally.worst = max(tally.worst, difference if difference == difference else float("inf"))
    tally.num_wrong += gap > tolerance and int(logits.argmax()) != int(expected.argmax())
