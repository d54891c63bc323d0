"""How exact each family is: our logits against transformers', and native kernels against ours.

``python -m shoal.load.exactness`` runs tiny models of random weights and rewrites the tables of
``docs/exactness.md``.
"""

import argparse
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.native import make_native, missing_ops
from shoal.backend.weights.catalogue import kernels_dir
from shoal.backend.weights.loader import LoadedModel, load_model
from shoal.kernels.native_library import NativeLibrary, load_native
from shoal.load.paged_model import PagedModel, TheirSequence
from shoal.load.tiny_models import TINY_MODELS, VOCAB_SIZE, write_tiny_model

DTYPES = (torch.float32, torch.bfloat16)
PROMPT_LENS = (1, 2, 9, 17, 31)
BATCH_LENS = (1, 3, 8, 13, 17, 24, 30, 31)
NUM_DECODED = 18
MAX_LEN = 64
# Native kernels and reference must agree on the greedy token where the reference's two best logits
# are further apart than this share of the logits' standard deviation. Closer ones are a tie as far
# as bf16 can tell: the reference itself is off by more from fp32.
GAP_TOLERANCE = {torch.float32: 0.001, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True)
class Alone:
    """One sequence at a time, on the reference: the worst difference from transformers' logits."""

    num_rows: int
    num_equal_rows: int
    worst: float


@dataclass(frozen=True, slots=True)
class Closeness:
    """Native kernels against the reference."""

    worst: float  # logit difference
    mean: float
    num_rows: int
    num_clear: int  # rows whose two best logits are further apart than the tolerance
    num_agreeing: int  # of these, with the same greedy token


def random_prompt(length: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Token ids that depend on the length alone."""
    generator = torch.Generator().manual_seed(length)
    ids: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return ids


def measure_alone(
    theirs: Any, ours: LoadedModel, dtype: torch.dtype, lengths: Sequence[int] = PROMPT_LENS
) -> Alone:
    """Prefill and greedy decode of several prompts, each alone, through the paged cache."""
    pairs = [pair for length in lengths for pair in _run_alone(theirs, ours, dtype, length)]
    equal = sum(int((mine == other).all(-1).sum()) for mine, other in pairs)
    return Alone(sum(map(len, (mine for mine, _ in pairs))), equal, _worst(pairs))


def _run_alone(
    theirs: Any, ours: LoadedModel, dtype: torch.dtype, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    paged = PagedModel(ours.model, ours.config, dtype, 1, MAX_LEN)
    reference = TheirSequence(theirs)
    sequence = paged.add(random_prompt(length))
    expected = reference.feed(sequence.token_ids)
    yield paged.step([sequence], all_rows=True), expected
    for _ in range(NUM_DECODED):
        token = int(expected[-1].argmax())
        sequence.token_ids.append(token)
        expected = reference.feed([token])
        yield paged.step([sequence]), expected


def measure_batch(theirs: Any, ours: LoadedModel, dtype: torch.dtype) -> float:
    """Eight prompts of other lengths in one batch, and greedy decode: the worst difference from
    transformers' logits of each alone."""
    paged = PagedModel(ours.model, ours.config, dtype, len(BATCH_LENS), MAX_LEN)
    sequences = [paged.add(random_prompt(length)) for length in BATCH_LENS]
    references = [TheirSequence(theirs) for _ in BATCH_LENS]
    fed = [sequence.token_ids for sequence in sequences]
    worst = 0.0
    for _ in range(NUM_DECODED):
        expected = torch.stack(
            [
                reference.feed(token_ids)[-1]
                for reference, token_ids in zip(references, fed, strict=True)
            ]
        )
        worst = max(worst, _worst([(paged.step(sequences), expected)]))
        fed = [[int(row.argmax())] for row in expected]
        for sequence, token_ids in zip(sequences, fed, strict=True):
            sequence.token_ids.extend(token_ids)
    return worst


def measure_native(folder: Path, dtype: torch.dtype, library: NativeLibrary) -> Closeness:
    """Both ways over the same texts: a prefill of most, then token by token."""
    reference, other = load_model(folder, dtype), load_model(folder, dtype)
    native = make_native(other.model, library)
    vocab_size = reference.config.vocab_size
    texts = [random_prompt(length, vocab_size) for length in range(40, 48)]
    expected = torch.cat([_all_logits(reference.model, reference.config, dtype, t) for t in texts])
    found = torch.cat([_all_logits(native, native.config, dtype, text) for text in texts])
    return compare(found, expected, dtype)


def compare(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> Closeness:
    """Two models' logits [num_rows, vocab_size] of the same tokens."""
    difference = (found - expected).abs()
    best = expected.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > GAP_TOLERANCE[dtype] * expected.std(dim=-1)
    agreeing = found.argmax(-1) == expected.argmax(-1)
    return Closeness(
        worst=float(difference.max()),
        mean=float(difference.mean()),
        num_rows=len(expected),
        num_clear=int(clear.sum()),
        num_agreeing=int((clear & agreeing).sum()),
    )


def _all_logits(
    model: Any, config: AnyConfig, dtype: torch.dtype, text: Sequence[int]
) -> torch.Tensor:
    paged = PagedModel(model, config, dtype, 1, MAX_LEN)
    sequence = paged.add(text[:-8])
    rows = [paged.step([sequence], all_rows=True)]
    for token in text[-8:]:
        sequence.token_ids.append(token)
        rows.append(paged.step([sequence]))
    return torch.cat(rows)


def _worst(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max(float((mine - other).abs().max()) for mine, other in pairs)


def family_rows(name: str, library: NativeLibrary) -> tuple[str, str]:
    """The line of one family in the table of exactness, and its line in that of the kernels."""
    exact, close = [name], [name]
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            theirs = write_tiny_model(name, Path(folder), dtype)
            ours = load_model(Path(folder), dtype)
            exact.append(_alone_cell(measure_alone(theirs, ours, dtype)))
            exact.append(_number(measure_batch(theirs, ours, dtype)))
            if missing_ops(ours.config) is None:
                close += _close_cells(measure_native(Path(folder), dtype, library))
            else:
                close += ["reference", "", ""]
    return _line(exact), _line(close)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _alone_cell(alone: Alone) -> str:
    if alone.num_equal_rows == alone.num_rows:
        return f"all {alone.num_rows} equal"
    return f"{alone.num_equal_rows} of {alone.num_rows} equal, worst {_number(alone.worst)}"


def _close_cells(close: Closeness) -> list[str]:
    agreement = f"{close.num_agreeing} of {close.num_clear}"
    return [_number(close.worst), _number(close.mean), agreement]


def _number(value: float) -> str:
    return "equal" if value == 0 else f"{value:.2g}"


def replace_table(text: str, name: str, lines: Sequence[str]) -> str:
    """``text`` with the lines between the marks of a table replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no table marked {begin}")
    return "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])


_EXACT_HEAD = (
    "| family | fp32, alone | fp32, batch of 8 | bf16, alone | bf16, batch of 8 |",
    "|---|---|---|---|---|",
)
_CLOSE_HEAD = (
    "| family | fp32 worst | mean | greedy equal | bf16 worst | mean | greedy equal |",
    "|---|---|---|---|---|---|---|",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/exactness.md"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    library = load_native(kernels_dir())
    exact, close = list(_EXACT_HEAD), list(_CLOSE_HEAD)
    for name in TINY_MODELS:
        exact_line, close_line = family_rows(name, library)
        exact.append(exact_line)
        close.append(close_line)
        print(exact_line, close_line, sep="\n", flush=True)
    text = options.output.read_text(encoding="utf-8")
    text = replace_table(text, "exactness", exact)
    options.output.write_text(replace_table(text, "kernels", close), encoding="utf-8")


if __name__ == "__main__":
    main()
