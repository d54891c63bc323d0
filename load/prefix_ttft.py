"""Time to first token of a prompt seen before, against its first time, on a running server.

    shoal serve &
    python load/prefix_ttft.py [--url 127.0.0.1:8001] [--report load/reports/prefix-ttft.md]

Each prompt is of random token ids, so that nothing of it is cached the first time. First and second
time follow each other, so that a noisy machine disturbs both alike.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.client.sdk import Client

VOCAB = range(1000, 40_000)


def main(
    url: str = "127.0.0.1:8001",
    model: str = "smollm2-135m-instruct",
    prompt_tokens: int = 1000,
    rounds: int = 15,
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Print a table; with --report also write it."""
    draw = random.Random(0)
    first, second = [], []
    with Client(url, model=model) as client:
        ttft_ms(client, draw.choices(VOCAB, k=16))  # connect
        for _ in range(rounds):
            prompt = draw.choices(VOCAB, k=prompt_tokens)
            first.append(ttft_ms(client, prompt))
            second.append(ttft_ms(client, prompt))
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    lines = [
        f"{rounds} prompts of {prompt_tokens} random tokens, each asked twice, one at a time.",
        "",
        "| time | median TTFT, ms | range, ms |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} to {max(times):.1f} |"
            for name, times in (("first", first), ("second", second))
        ),
        "",
        f"First over second, median of the pairs: {ratio:.1f}",
    ]
    text = "\n".join(lines)
    print(text)
    if report is not None:
        head = (
            "# Time to first token, cached prompt\n\n`python load/prefix_ttft.py` makes this page."
        )
        report.write_text(f"{head}\n\n{text}\n")


def ttft_ms(client: Client, prompt: list[int]) -> float:
    """Milliseconds from the call to the first token."""
    start = time.perf_counter()
    with client.stream(prompt, max_tokens=2, temperature=0, ignore_eos=True) as stream:
        for delta in stream:
            if delta.text or delta.finish_reason:
                return 1000 * (time.perf_counter() - start)
    raise RuntimeError("the stream ended without a token")


if __name__ == "__main__":
    typer.run(main)
