"""The map in docs/structures.md is whole: every module is on it, and what is on it exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AREAS = ("scheduler", "kernels", "backend", "client", "load")
# In back quotes on the map, yet no module: folders, files, formats, settings, values.
OTHERS = {
    "1/model.yaml",
    "config.json",
    "config.pbtxt",
    "model.yaml",
    "pb_utils",
    "shoal models",
    "shoal quantize",
}


def modules() -> list[Path]:
    return [
        path.relative_to(ROOT)
        for area in AREAS
        for path in sorted((ROOT / area).rglob("*.py"))
        if path.stem != "__main__" and "node_modules" not in path.parts
    ]


def table() -> str:
    text = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
    return text.partition("## Modules")[2].partition("## Rules")[0]


def names() -> set[str]:
    """What stands in back quotes in the table, without a trailing slash."""
    return {name.rstrip("/") for name in re.findall(r"`([^`\n]+)`", table())}


def rows_of(area: str) -> str:
    """The table's rows from the one that opens an area to the next area's."""
    rest = table().partition(f"| `{area}/` |")[2]
    return re.split(r"^\| `[a-z_]+/` \|", rest, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("area", AREAS)
def test_every_module_is_on_the_map(area: str) -> None:
    quoted = set(re.findall(r"`([^`\n]+)`", rows_of(area)))
    missing = [str(path) for path in modules() if path.parts[0] == area and path.stem not in quoted]
    assert missing == []


def test_what_is_on_the_map_exists() -> None:
    known = {path.stem for path in modules()}
    known |= {path.parent.name for path in modules()} | {path.name for path in ROOT.iterdir()}
    known |= {path.stem for path in (ROOT / "tests").glob("*.py")}
    known |= {path.name for area in (*AREAS, "tests") for path in (ROOT / area).rglob("*")}
    unknown = [
        name
        for name in names() - OTHERS
        if name not in known and not (ROOT / name).exists() and not _is_path(name)
    ]
    assert sorted(unknown) == []


def _is_path(name: str) -> bool:
    """Of a file below one of the areas, as ``native/quantized.h``."""
    return "/" in name and any((ROOT / area / name).exists() for area in AREAS)
