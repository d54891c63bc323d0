"""What quantised weights cost: perplexity of a public-domain text, as the served model scores it.

    python -m shoal.load.perplexity [--quantization none,int8,fp8,int4] [--tokens 20480]

For each format a server of its own is started; the text's tokens go to /v1/completions in windows,
with ``echo`` and ``logprobs``, and the prompt's own logprobs come back. Windows do not overlap, and
the first token of each is not scored. Then transformers scores the same windows with weights that
others rounded to 4 bits (``weight_references``). Writes a Markdown table.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib import request
from urllib.error import URLError

import typer

from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import DEFAULT_MODEL, resolve_weights
from shoal.load.public_texts import read_text
from shoal.load.weight_references import REFERENCES, reference_perplexities

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 600.0


def main(
    quantization: Annotated[str, typer.Option(help="Formats, by commas.")] = "none,int8,fp8,int4",
    text: str = "annual-message-1907",
    tokens: int = 20480,
    window: int = 1024,
    weights: str = DEFAULT_MODEL,
    dtype: str = "auto",
    port: Annotated[int, typer.Option(help="The first of four for the server.")] = 19170,
    references: Annotated[str, typer.Option(help="By commas; empty: none.")] = "nearest,q4_0",
    report: Annotated[Path | None, typer.Option(help="Write Markdown there.")] = None,
) -> None:
    """Print a table; with --report also write it."""
    ids = Tokenizer.from_checkpoint(resolve_weights(weights)).encode(read_text(text))[:tokens]
    windows = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
    lines = [
        f"Perplexity of {weights} ({dtype}) on `{text}`, {len(ids)} tokens in windows of {window}, "
        "from the prompt logprobs of a running server; what transformers computed, in its process.",
        "",
        "| weights | perplexity | against the first | seconds |",
        "|---|---|---|---|",
    ]
    first = 0.0
    for name in quantization.split(","):
        settings = {"weights": weights, "dtype": dtype, "quantization": name}
        with served(settings, port):
            start = time.monotonic()
            value = perplexity(f"http://127.0.0.1:{port}", windows)
            seconds = time.monotonic() - start
        first = first or value
        lines.append(f"| {name} | {value:.3f} | {value / first - 1:+.2%} | {seconds:.0f} |")
        print(lines[-1], flush=True)
    start = time.monotonic()
    names = [name for name in references.split(",") if name]
    found = reference_perplexities(resolve_weights(weights), windows, names)
    for name, value in found.items():
        label = REFERENCES[name][0]
        seconds = (time.monotonic() - start) / len(found)
        lines.append(f"| {label} | {value:.3f} | {value / first - 1:+.2%} | {seconds:.0f} |")
    print("\n".join(lines))
    if report is not None:
        command = f"Made by `python -m shoal.load.perplexity --text {text} --tokens {tokens}`."
        text_lines = ["# What quantised weights cost", "", command, *lines]
        report.write_text("\n".join(text_lines) + "\n", encoding="utf-8")


def perplexity(url: str, windows: list[list[int]]) -> float:
    """exp of the mean negative log likelihood of all tokens but the first of each window."""
    total, count = 0.0, 0
    for idx, window in enumerate(windows):
        body = {
            "model": "scored",
            "prompt": window,
            "echo": True,
            "logprobs": 0,
            "max_tokens": 1,
            "temperature": 0,
        }
        reply = _post(f"{url}/v1/completions", body)
        scores = reply["choices"][0]["logprobs"]["token_logprobs"][1 : len(window)]
        total -= sum(scores)
        count += len(scores)
        print(f"window {idx + 1} of {len(windows)}: {math.exp(total / count):.3f}", flush=True)
    return math.exp(total / count)


@contextmanager
def served(settings: dict[str, Any], port: int) -> Iterator[None]:
    """A server of one model, ``scored``, with these engine settings, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "scored" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text('backend: "shoal"\n')
        (version / "model.yaml").write_text(json.dumps(settings))  # JSON is YAML
        shoal = shutil.which("shoal") or str(Path(sys.executable).parent / "shoal")
        names = ("openai", "http", "grpc", "metrics")
        flags = [f"--{name}-port={port + idx}" for idx, name in enumerate(names)]
        command = [shoal, "serve", f"--model-repository={folder}", "--model=scored", *flags]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"})
        try:
            _wait_ready(f"http://127.0.0.1:{port}/health/ready", process)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.3)
    raise RuntimeError("the server did not become ready")


def _post(url: str, body: dict[str, Any]) -> Any:
    ask = request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with request.urlopen(ask, timeout=REQUEST_TIMEOUT_S) as reply:
        return json.load(reply)


if __name__ == "__main__":
    typer.run(main)
