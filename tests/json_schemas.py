"""JSON schemas of many kinds, for structured output."""

from itertools import product
from typing import Any

WORDS = ["red", "green", "naïve", "日本", "a b", 'q"q', "back\\slash"]


def all_schemas() -> list[dict[str, Any]]:
    """Over 200 schemas: nesting, enums, ranges, arrays, patterns, anyOf, $ref, unicode keys."""
    return [
        *_numbers(),
        *_strings(),
        *_arrays(),
        *_objects(),
        *_choices(),
        *_references(),
    ]


def _numbers() -> list[dict[str, Any]]:
    kinds = ("integer", "number")
    ranges = [(0, 9), (-5, 5), (10, 1000), (0, 1), (-100, -90), (7, 7), (99, 101), (-1, 65535)]
    schemas: list[dict[str, Any]] = [{"type": kind} for kind in kinds]
    schemas += [
        {"type": kind, "minimum": low, "maximum": high}
        for kind, (low, high) in product(kinds, ranges)
    ]
    schemas += [
        {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        for kind, (low, high) in product(kinds, ranges)
    ]
    schemas += [{"type": "number", "minimum": 0.5, "maximum": 2.25}]
    schemas += [{"type": "integer", "multipleOf": step} for step in (2, 5, 10)]
    return schemas


def _strings() -> list[dict[str, Any]]:
    lengths = [(0, 3), (2, 2), (1, 8), (5, 6), (0, 1), (3, 9)]
    patterns = ["^[a-z]+$", "^[A-Z]{2}[0-9]{3}$", "^(foo|bar)+$", r"^\d{4}-\d{2}$", "^x.*y$"]
    formats = ["date", "time", "date-time", "uuid", "ipv4", "email"]
    return [
        *({"type": "string", "minLength": low, "maxLength": high} for low, high in lengths),
        *(
            {"type": "string", "pattern": pattern, "maxLength": length}
            for pattern, length in product(patterns, (7, 12))
        ),
        *({"type": "string", "format": name} for name in formats),
        *({"const": word} for word in WORDS),
        *({"enum": WORDS[:count]} for count in range(1, len(WORDS))),
    ]


def _arrays() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"enum": WORDS},
        {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        {"type": "string", "maxLength": 3},
    ]
    counts = [(0, 2), (1, 1), (2, 2), (2, 4), (3, 5)]
    schemas = [
        {"type": "array", "items": item, "minItems": low, "maxItems": high}
        for item, (low, high) in product(items, counts)
    ]
    schemas.append(
        {"type": "array", "prefixItems": items[:3], "items": False, "minItems": 3, "maxItems": 3}
    )
    return schemas


def _objects() -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = [
        {"type": "integer", "minimum": -9, "maximum": 9},
        {"type": "string", "maxLength": 5},
        {"type": "boolean"},
        {"enum": [None, 1, "two", [3], {"four": 4}]},
    ]
    names = [["a"], ["a", "b"], ["ключ", "名前"], ["x y", 'q"', "$ref"], ["a", "b", "c", "d"]]
    schemas: list[dict[str, Any]] = []
    for keys, value in product(names, values):
        properties = dict.fromkeys(keys, value)
        schemas.append(_closed(properties, keys))
        schemas.append(_closed(properties, keys[:1]))
        schemas.append(_closed(properties, []))
    for depth, value in product(range(1, 6), values):
        nested: dict[str, Any] = value
        for _ in range(depth):
            nested = _closed({"in": nested}, ["in"])
        schemas.append(nested)
    schemas += [
        {
            "type": "object",
            "properties": {"a": value},
            "required": ["a"],
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        }
        for value in values
    ]
    schemas.append({"type": "object"})
    return schemas


def _closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _choices() -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = [
        {"type": "null"},
        {"type": "integer", "minimum": 1, "maximum": 3},
        {"type": "string", "maxLength": 4},
        _closed({"kind": {"const": "a"}, "n": {"type": "boolean"}}, ["kind"]),
        _closed({"kind": {"const": "b"}}, ["kind"]),
    ]
    return [
        {key: options[start:stop]}
        for key in ("anyOf", "oneOf")
        for start in range(4)
        for stop in range(start + 2, 6)
    ] + [
        {"type": ["string", "null"], "maxLength": 3},
        {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
    ]


def _references() -> list[dict[str, Any]]:
    tree = _closed(
        {
            "v": {"type": "integer", "minimum": 0, "maximum": 9},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
        },
        ["v", "next"],
    )
    words = {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 3}
    return [
        {"$ref": "#/$defs/tree", "$defs": {"tree": tree}},
        {**words, "$defs": {"word": {"enum": WORDS}}},
        {"$ref": "#/definitions/n", "definitions": {"n": {"type": "boolean"}}},
    ]
