"""What keys and values in 8 bits cost in accuracy: perplexity, and whether greedy tokens stay.

    python load/kv_accuracy.py [--windows N] [--length N] [--report FILE]

SmolLM2-135M reads windows of a public text, each once per kind of KV cache, over the native
kernels in bfloat16. Every position predicts the next token; nothing is generated, so one wrong
token cannot lead to others. Deterministic. Writes a Markdown report.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.backend.kv_cache import PagedKVCache, bytes_per_block
from shoal.backend.machine import num_usable_cpus
from shoal.backend.model_runner import build_forward_batch
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import DEFAULT_MODEL, kernels_dir, resolve_weights
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import load_native
from shoal.load.public_texts import read_text, text_names
from shoal.scheduler.outputs import ScheduledSequence
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

KINDS = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
BLOCK_SIZE = 16
CHUNK = 256  # tokens of a step, and rows of logits
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of all windows' positions, in order."""

    losses: torch.Tensor  # float32: minus the logarithm of the true next token's probability
    tokens: torch.Tensor  # int64: the likeliest

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.double().mean()))


def predict(model: NativeDecoder, windows: list[list[int]], stored: torch.dtype) -> Predictions:
    """Read every window into a cache of its own."""
    losses, tokens = [], []
    for window in windows:
        num_blocks = -(-len(window) // BLOCK_SIZE)
        kv = PagedKVCache(model.config.kv_layout, [num_blocks], BLOCK_SIZE, stored)
        sequence = Sequence(
            0, window, len(window), SamplingParams(), block_tables=[list(range(num_blocks))]
        )
        for start in range(0, len(window) - 1, CHUNK):
            targets = torch.tensor(window[start + 1 : start + 1 + CHUNK])
            logits = read_chunk(model, kv, sequence, len(targets))
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
            tokens.append(logits.argmax(dim=-1))
    return Predictions(torch.cat(losses), torch.cat(tokens))


def read_chunk(
    model: NativeDecoder, kv: PagedKVCache, sequence: Sequence, num_tokens: int
) -> torch.Tensor:
    """Logits after each of the next tokens; mutates sequence and cache."""
    batch = build_forward_batch([ScheduledSequence(sequence, num_tokens)], BLOCK_SIZE, CPU)
    batch.logits_indices.resize_(num_tokens)
    torch.arange(num_tokens, out=batch.logits_indices)
    logits = model.forward(batch, kv)
    sequence.num_computed_tokens += num_tokens
    return logits


def report_lines(found: dict[str, Predictions], model: NativeDecoder) -> list[str]:
    base = found["bfloat16"]
    lines = [
        "| KV cache | bytes a token | perplexity | same greedy token "
        "| mean change of a true token's log-probability | largest |",
        "|---|---|---|---|---|---|",
    ]
    for name, predictions in found.items():
        (size,) = bytes_per_block(model.config.kv_layout, BLOCK_SIZE, KINDS[name])
        same = (predictions.tokens == base.tokens).double().mean()
        change = (predictions.losses - base.losses).abs()
        lines.append(
            f"| {name} | {size // BLOCK_SIZE:,} | {predictions.perplexity:.3f} | {same:.2%} "
            f"| {change.mean():.4f} | {change.max():.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", default=text_names()[0], choices=text_names())
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument(
        "--report", type=Path, default=Path(__file__).parent / "reports" / "kv-accuracy.md"
    )
    args = parser.parse_args()
    torch.set_num_threads(num_usable_cpus())
    weights = resolve_weights(DEFAULT_MODEL)
    reference = load_model(weights, torch.bfloat16).model
    assert isinstance(reference, Decoder)
    model = NativeDecoder(reference, load_native(kernels_dir(), print))
    ids = Tokenizer.from_checkpoint(weights).encode(read_text(args.text))
    step = len(ids) // args.windows
    windows = [ids[idx * step : idx * step + args.length] for idx in range(args.windows)]
    found = {name: predict(model, windows, stored) for name, stored in KINDS.items()}
    lines = [
        "# Keys and values in 8 bits: accuracy",
        "",
        f"Made by `python load/kv_accuracy.py`. {DEFAULT_MODEL} in bfloat16 on the native kernels "
        f"reads {args.windows} windows of {args.length:,} tokens of `{args.text}`; at each of "
        f"{len(found['bfloat16'].losses):,} positions it predicts the next token. Greedy tokens "
        "and log-probabilities are compared with those over keys and values in bfloat16.",
        "",
        *report_lines(found, model),
    ]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written: {args.report}")


if __name__ == "__main__":
    main()
