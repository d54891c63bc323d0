"""Structured output: from what a request asks for to a grammar that its text must follow.

``response_format`` is OpenAI's; ``guided_json``, ``guided_regex``, ``guided_choice`` and
``guided_grammar`` (Lark or GBNF) are vLLM's. All become one grammar of llguidance's, checked here
and compiled by ``grammar_compiler``. What it cannot enforce is refused by name: text that should
be structured never goes unconstrained.
"""

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, grammar_from

from shoal.backend.grammar_compiler import LIMITS
from shoal.backend.strict_json import sound_json
from shoal.scheduler.errors import RequestError

FIELDS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

MAX_PATTERN_LENGTH = 4096  # characters of a regular expression or one choice
MAX_CHOICES = 1024
MAX_NESTING = 64  # brackets in a grammar or regular expression
MAX_REASON = 300  # characters of the compiler's own complaint that a client sees

MAX_BOUND = 2**53  # of a number in a schema: what a double holds exactly

_VALUES = ("enum", "const", "default", "examples")  # of a schema: any JSON, no schemas
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

# Space between JSON's tokens: free, but no model can go on with it for ever.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{0,8}"}


def take_grammar(values: dict[str, Any]) -> str | None:
    """Remove the fields of structured output from ``values``; return the grammar they ask for.

    Raises RequestError, naming the field and the construct that cannot be used.
    """
    given = {name: values.pop(name) for name in FIELDS if name in values}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise RequestError(f"Give only one of {', '.join(FIELDS)} (found {names}).", param=names)
    for name, value in given.items():
        grammar = _READERS[name](value)
        if grammar is not None:
            _check(name, grammar)
        return grammar
    return None


def _response_format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_grammar("response_format", {"type": "object"})
    if kind != "json_schema":
        raise _wrong("response_format.type", "must be text, json_object or json_schema")
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, dict) or "schema" not in wrapper:
        raise _wrong("response_format.json_schema", "must be an object with a schema")
    return _json_grammar("response_format.json_schema.schema", wrapper["schema"])


def _guided_json(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = sound_json(value)
        except ValueError:
            raise _wrong("guided_json", "must be a JSON schema") from None
    return _json_grammar("guided_json", value)


def _json_grammar(param: str, schema: Any) -> str:
    if not isinstance(schema, dict):
        raise _wrong(param, "must be an object: a JSON schema")
    _check_patterns(param, schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)  # type: ignore[arg-type]


def _guided_regex(value: Any) -> str:
    _check_pattern("guided_regex", value)
    return LLMatcher.grammar_from_regex(value)


def _guided_choice(value: Any) -> str:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise _wrong("guided_choice", f"must be a list of 1 to {MAX_CHOICES} strings")
    for item in value:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_PATTERN_LENGTH:
            raise _wrong(
                "guided_choice", f"must hold strings of 1 to {MAX_PATTERN_LENGTH} characters"
            )
    return grammar_from("choice", json.dumps(value))


def _guided_grammar(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong("guided_grammar", "must be a grammar in Lark or GBNF form")
    _check_nesting("guided_grammar", value)
    try:
        return grammar_from("grammar", value)
    except (ValueError, RecursionError) as error:
        raise unusable_grammar("guided_grammar", str(error)) from None


def json_grammar(param: str, schema: dict[str, Any]) -> str:
    """The grammar of a schema. Raises RequestError that names ``param``."""
    grammar = _json_grammar(param, schema)
    _check(param, grammar)
    return grammar


_READERS: dict[str, Callable[[Any], str | None]] = {
    "response_format": _response_format,
    "guided_json": _guided_json,
    "guided_regex": _guided_regex,
    "guided_choice": _guided_choice,
    "guided_grammar": _guided_grammar,
}


def _check(param: str, grammar: str) -> None:
    error = LLMatcher.validate_grammar(grammar, limits=LIMITS)
    if error:
        raise unusable_grammar(param, error)


def _check_patterns(param: str, schema: Any) -> None:
    """Every regular expression in a schema, wherever it stands."""
    if isinstance(schema, list):
        for item in schema:
            _check_patterns(param, item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            _check_pattern(f"{param}: pattern", schema["pattern"])
        if isinstance(schema.get("patternProperties"), dict):
            for pattern in schema["patternProperties"]:
                _check_pattern(f"{param}: patternProperties", pattern)
        _check_numbers(param, schema)
        for key, item in schema.items():
            if key not in _VALUES:
                _check_patterns(param, item)


def _check_numbers(param: str, schema: dict[str, Any]) -> None:
    """Numbers that the compiler would round, or take for others."""
    for key in _BOUNDS:
        bound = schema.get(key)
        if isinstance(bound, int | float) and abs(bound) > MAX_BOUND:
            raise _wrong(f"{param}: {key}", f"must be in [-{MAX_BOUND}, {MAX_BOUND}]")
    step = schema.get("multipleOf")
    if isinstance(step, int | float) and not step > 0:
        raise _wrong(f"{param}: multipleOf", "must be above 0")


def _check_pattern(param: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not 1 <= len(pattern) <= MAX_PATTERN_LENGTH:
        raise _wrong(param, f"must be a regular expression of 1 to {MAX_PATTERN_LENGTH} characters")
    _check_nesting(param, pattern)


def _check_nesting(param: str, text: str) -> None:
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth > MAX_NESTING:
            raise _wrong(param, f"must be nested at most {MAX_NESTING} levels deep")


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}.", param=param.split(":")[0])


def unusable_grammar(param: str, reason: str) -> RequestError:
    """The refusal of a grammar, with the compiler's reason."""
    reason = " ".join(reason.removesuffix("<non-verbose/>").split())[:MAX_REASON]
    return RequestError(
        f"{param} cannot be enforced: {reason}", param=param, code="unsupported_grammar"
    )
