"""Long English texts in the public domain, for measures over long contexts."""

import gzip
from pathlib import Path

_FOLDER = Path(__file__).parent / "texts"


def text_names() -> list[str]:
    """The names that ``read_text`` takes."""
    return sorted(path.name.removesuffix(".txt.gz") for path in _FOLDER.glob("*.txt.gz"))


def read_text(name: str) -> str:
    """One text, whole. ``texts/README.md`` says whence each is. Raises KeyError for another."""
    if name not in text_names():
        raise KeyError(f"no text is named {name!r}: there are {', '.join(text_names())}")
    return gzip.decompress((_FOLDER / f"{name}.txt.gz").read_bytes()).decode()
