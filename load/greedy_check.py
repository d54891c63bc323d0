"""Greedy text of the real models against transformers': 50 prompts, 64 tokens each, in fp32.

``python -m shoal.load.greedy_check [--model NAME]`` runs the models of the catalogue that are in
the cache and rewrites their table in ``docs/exactness.md``. Ours comes from one batch of all
prompts on the native kernels. transformers checks it in one pass a prompt: if each of our tokens is
its greedy one after the tokens before, then by induction the texts are equal.
"""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.backend.models.decoder import Decoder
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import CATALOGUE, kernels_dir, resolve_weights
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import load_native
from shoal.load.exactness import random_prompt, replace_table
from shoal.load.paged_model import PagedModel, TheirSequence

NUM_TOKENS = 64
DTYPE = torch.float32
SUBJECTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three laws of motion are",
    "Question: What is 12 times 12?\nAnswer:",
    "Dear Sir or Madam,\n\nI am writing to",
    "La capitale de l'Italie est",
    "SELECT name, age FROM users WHERE",
    "The mitochondria is",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, the first human",
    "A recipe for pancakes:\n\n1.",
    "To be, or not to be:",
    "import numpy as np\n\nx = np.",
    "The difference between a virus and a bacterium is",
    "Roses are red, violets are",
    "<html>\n<head>\n<title>",
    "My favourite thing about the winter is",
    "Breaking news: scientists have discovered",
    "Berlin ist die Hauptstadt von",
    "The speed of light in a vacuum is",
    "Photosynthesis is the process by which",
    "class Stack:\n    def __init__(self):",
    "The quick brown fox",
)
# Each subject stands for two prompts: itself, and after a sentence of its own.
PROMPTS = (*SUBJECTS, *(f"Let me think about this carefully. {text}" for text in SUBJECTS))


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """How many texts are transformers' own, and how near a tie those that are not part from it."""

    num_prompts: int
    num_equal: int
    gaps: tuple[float, ...]  # between the two best logits where a text parts
    num_exact_rows: int  # of logits on the reference kernels, one sequence alone
    num_rows: int


def check_model(name: str) -> GreedyResult:
    """Run one model of the catalogue, which must be in the cache."""
    path = resolve_weights(name)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=DTYPE
    ).eval()
    tokenizer = Tokenizer.from_checkpoint(path)
    prompts = [tokenizer.encode(text, add_bos=True) for text in PROMPTS]
    exact, rows = _exact_rows(path, theirs, prompts[:3])
    texts = _generate(path, prompts)
    partings = [_parting(theirs, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    gaps = tuple(gap for gap in partings if gap is not None)
    return GreedyResult(len(prompts), len(prompts) - len(gaps), gaps, exact, rows)


def _exact_rows(path: Path, theirs: Any, prompts: Sequence[list[int]]) -> tuple[int, int]:
    """Prefill and a few decoded tokens on the reference kernels: equal rows, and all."""
    loaded = load_model(path, DTYPE)
    paged = PagedModel(loaded.model, loaded.config, DTYPE, len(prompts), 64)
    pairs = []
    for prompt in prompts:
        sequence, reference = paged.add(prompt), TheirSequence(theirs)
        pairs.append((paged.step([sequence], all_rows=True), reference.feed(prompt)))
        for token in random_prompt(6):
            sequence.token_ids.append(token)
            pairs.append((paged.step([sequence]), reference.feed([token])))
    equal = sum(int((mine == other).all(-1).sum()) for mine, other in pairs)
    return equal, sum(len(mine) for mine, _ in pairs)


def _generate(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, as one batch on the native kernels; EOS does not end them."""
    loaded = load_model(path, DTYPE)
    assert isinstance(loaded.model, Decoder)
    model = NativeDecoder(loaded.model, load_native(kernels_dir()))
    max_len = max(map(len, prompts)) + NUM_TOKENS
    paged = PagedModel(model, loaded.config, DTYPE, len(prompts), max_len)
    sequences = [paged.add(prompt) for prompt in prompts]
    for _ in range(NUM_TOKENS):
        for sequence, row in zip(sequences, paged.step(sequences), strict=True):
            sequence.token_ids.append(int(row.argmax()))
    return [
        sequence.token_ids[len(prompt) :]
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]


@torch.inference_mode()
def _parting(theirs: Any, prompt: list[int], text: list[int]) -> float | None:
    """None where the text is transformers' greedy one, else its gap between the two best there."""
    logits = theirs(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
    wrong = (logits.argmax(-1) != torch.tensor(text)).nonzero()
    if not len(wrong):
        return None
    best = logits[int(wrong[0])].topk(2).values
    return float(best[0] - best[1])


def _line(name: str, result: GreedyResult) -> str:
    gaps = ", ".join(f"{gap:.1g}" for gap in result.gaps) or "none"
    return (
        f"| {CATALOGUE[name].description} | {result.num_exact_rows} of {result.num_rows} | "
        f"{result.num_equal} of {result.num_prompts} | {gaps} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=sorted(CATALOGUE), default=[])
    parser.add_argument("--output", type=Path, default=Path("docs/exactness.md"))
    options = parser.parse_args()
    names = options.model or list(CATALOGUE)
    lines = [
        "| model | rows equal, reference | texts equal, native | gap where a text parts |",
        "|---|---|---|---|",
    ]
    for name in names:
        lines.append(_line(name, check_model(name)))
        print(lines[-1], flush=True)
    text = options.output.read_text(encoding="utf-8")
    options.output.write_text(replace_table(text, "real models", lines), encoding="utf-8")


if __name__ == "__main__":
    main()
