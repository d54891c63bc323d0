"""Measuring tools, each run once and briefly: it must end well and have measured something."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from environments import FOLDER, python_environment
from served import MODEL, Served

from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import resolve_weights
from shoal.client.cli.settings import ServeSettings

Suite = Callable[[Served, dict[str, str]], int]
SUITES: dict[str, Suite] = {}
TIMEOUT_S = 280


def call(command: list[str], environment: dict[str, str], cwd: Path | None = None) -> int:
    """Run it with none of the project's own environment; the exit code."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV", "SHOAL_API_KEY")
    }
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_COLOR": "1"}
    settings = kept | quiet | environment
    try:
        return subprocess.run(command, cwd=cwd, env=settings, timeout=TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"not done in {TIMEOUT_S} s")
        return 124


def write_tokenizer(folder: Path) -> Path:
    """The served model's tokeniser as transformers reads it."""
    path = resolve_weights(MODEL, ServeSettings().cache_dir)
    tokenizer = Tokenizer.from_checkpoint(path)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.settings.chat_template,
        **tokenizer.settings.special_texts,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def suite(name: str) -> Callable[[Suite], Suite]:
    def register(function: Suite) -> Suite:
        SUITES[name] = function
        return function

    return register


@suite("lm-eval")
def lm_eval(served: Served, environment: dict[str, str]) -> int:
    """Log-likelihoods by echo and logprobs, whole texts, and answers, each with a known result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [
            f"model={MODEL}",
            f"base_url={served.openai_url}/v1/completions",
            f"tokenizer={write_tokenizer(folder)}",
            "tokenizer_backend=huggingface",
            "num_concurrent=4",
            "max_retries=1",
            "max_length=2048",
        ]
        command = [
            str(python_environment("lm-eval") / "lm_eval"),
            "run",
            *("--model", "local-completions", "--model_args", ",".join(arguments)),
            *("--tasks", "shoal_endings,shoal_perplexity,shoal_capitals"),
            *("--include_path", str(FOLDER / "lm_eval_tasks"), "--output_path", name),
        ]
        settings = environment | {"OPENAI_API_KEY": environment["SHOAL_CHECK_KEY"]}
        if code := call(command, settings, FOLDER / "lm_eval_tasks"):
            return code
        (path,) = folder.rglob("results_*.json")
        results = json.loads(path.read_text())["results"]
    accuracy = results["shoal_endings"]["acc,none"]
    named = results["shoal_capitals"]["names_it,none"]
    perplexity = results["shoal_perplexity"]["word_perplexity,none"]
    print(f"endings {accuracy:.2f}, capitals {named:.2f}, word perplexity {perplexity:.1f}")
    return 0 if accuracy >= 0.8 and named >= 0.75 and 1 < perplexity < 100 else 1


@suite("guidellm")
def guidellm(served: Served, environment: dict[str, str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_tokenizer(folder)
        key = environment["SHOAL_CHECK_KEY"]
        for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            report = folder / "report.json"
            command = [
                str(python_environment("guidellm") / "guidellm"),
                "run",
                "--disable-console-interactive",
                *("--backend", f"kind=openai_http,target={served.openai_url},model={MODEL},"
                  f"request_format={route},api_key={key}"),
                *("--profile", "kind=concurrent,streams=4"),
                *("--constraint", "kind=max_requests,count=12"),
                *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16"),
                *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
                *("--output", f"kind=json,path={report}"),
            ]  # fmt: skip
            if code := call(command, environment, folder):
                return code
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
            totals = benchmark["metrics"]["request_totals"]
            print(route, totals)
            if totals["errored"] or totals["successful"] < 12:
                return 1
    return 0


@suite("aiperf")
def aiperf(served: Served, environment: dict[str, str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_tokenizer(folder)
        for kind, *flags in (
            ("chat", "--streaming"),
            ("completions", "--streaming"),
            ("embeddings",),
            ("responses", "--streaming"),
        ):
            target = folder / kind
            command = [
                str(python_environment("aiperf") / "aiperf"),
                "profile",
                *("--model", MODEL, "--url", served.openai_url, "--endpoint-type", kind, *flags),
                *("--tokenizer", str(tokenizer), "--api-key", environment["SHOAL_CHECK_KEY"]),
                *("--concurrency", "4", "--request-count", "12"),
                *("--prompt-input-tokens-mean", "48", "--prompt-output-tokens-mean", "16"),
                *("--extra-inputs", "ignore_eos:true") * (kind in ("chat", "completions")),
                *("--output-artifact-dir", str(target), "--ui", "simple"),
            ]
            # Offline it takes a path for a name in its cache.
            if code := call(command, environment | {"HF_HUB_OFFLINE": ""}, folder):
                return code
            (path,) = target.rglob("profile_export_aiperf.json")
            measured = json.loads(path.read_text())
            count = measured["request_count"]["avg"]
            errors = measured.get("error_request_count") or {"avg": 0}
            print(kind, count, "requests,", errors["avg"], "errors")
            if count < 12 or errors["avg"]:
                return 1
    return 0


@suite("bench-serve")
def bench_serve(_: Served, environment: dict[str, str]) -> int:
    """As `vllm bench serve` asks; in the project's own environment."""
    return call([sys.executable, str(FOLDER / "bench_serve.py")], environment)
