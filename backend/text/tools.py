"""Tools of a chat request: what may be called, what must be, and how a model is told."""

import json
import re
from dataclasses import dataclass
from typing import Any

from shoal.scheduler.errors import RequestError

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
MAX_TOOLS = 128
MAX_BRANCH_DEPTH = 32  # of a tool's schema, that are looked into
MAX_CALLS = 16  # of one answer that must call
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TOOL_KEYS = ("name", "description", "parameters", "strict")

# For models whose template knows no tools; the form is Hermes', which many models have seen.
_INSTRUCTIONS = """You can call these functions, given as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON between these marks:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request offers. ``must_call``: the answer is nothing but calls, of
    ``names``; else the model decides."""

    tools: tuple[dict[str, Any], ...]  # in OpenAI's form, which templates take
    names: frozenset[str]
    must_call: bool = False
    max_calls: int = MAX_CALLS

    def schema(self) -> dict[str, Any]:
        """What an answer that must call looks like: a list of names and arguments."""
        called = [
            (index, tool["function"])
            for index, tool in enumerate(self.tools)
            if tool["function"]["name"] in self.names
        ]
        return {
            "type": "array",
            "items": {"anyOf": [_call_schema(*item) for item in called]},
            "minItems": 1,
            "maxItems": self.max_calls,
            "$defs": dict(_definition(*item) for item in called),
        }


def take_tools(values: dict[str, Any]) -> ToolUse | None:
    """Remove the fields about tools from ``values``. None: no call is wanted.

    Raises RequestError, naming the field.
    """
    tools, choice, parallel = (values.pop(name, None) for name in FIELDS)
    if parallel is not None and not isinstance(parallel, bool):
        raise _wrong("parallel_tool_calls", "must be true or false")
    checked = _check_tools([] if tools is None else tools)
    names = [tool["function"]["name"] for tool in checked]
    max_calls = 1 if parallel is False else MAX_CALLS
    if choice in (None, "auto"):
        return ToolUse(checked, frozenset(names), max_calls=max_calls) if checked else None
    if choice == "none":
        return None
    if choice == "required":
        if not checked:
            raise _wrong("tool_choice", "is required, so tools must hold at least one")
        return ToolUse(checked, frozenset(names), True, max_calls)
    name = _chosen_name(choice)
    if name not in names:
        raise _wrong("tool_choice", f"names {name[:64]!r}, which is not among the tools")
    return ToolUse(checked, frozenset({name}), True, 1)


def describe_tools(
    messages: list[dict[str, Any]], tools: tuple[dict[str, Any], ...]
) -> list[dict[str, Any]]:
    """For templates that know no tools: they are told of in the system message."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=listed)
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """For templates that know no calls: a call, or its result, in the text of its message."""
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    if "tool_calls" not in message:
        return message
    calls = [
        json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        for call in message["tool_calls"]
    ]
    parts = [message["content"]] if message["content"] else []
    parts += [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": "\n".join(parts)}


def _check_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"must be a list of at most {MAX_TOOLS} tools")
    checked = tuple(_check_tool(tool, f"tools[{idx}]") for idx, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) < len(names):
        raise _wrong("tools", "must not hold two functions of the same name")
    return checked


def _check_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _wrong(f"{where}.type", "must be function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{where}.function", "must be an object with a name")
    for key in function:
        if key not in _TOOL_KEYS:
            raise _wrong(f"{where}.function", f"may hold {', '.join(_TOOL_KEYS)}, not {key[:64]!r}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.function.name", "must have 1 to 64 letters, digits, dots, _ and -")
    if not isinstance(function.get("description") or "", str):
        raise _wrong(f"{where}.function.description", "must be a string")
    if not isinstance(function.get("parameters") or {}, dict):
        raise _wrong(f"{where}.function.parameters", "must be a JSON schema")
    parameters = function.get("parameters") or {}
    if not _ObjectCheck(parameters).fits(parameters):
        raise _wrong(
            f"{where}.function.parameters",
            "must be a schema of objects: arguments have names. Put it into a property of one",
        )
    kept = {key: function[key] for key in _TOOL_KEYS if function.get(key) is not None}
    return {"type": "function", "function": kept}


class _ObjectCheck:
    """Whether schemas within ``root`` leave room for an object, as far as their types, values and
    branches say. Each is looked at once; what is too deep counts as leaving room."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, bool] = {}  # by the schema's id

    def fits(self, schema: Any, depth: int = 0) -> bool:
        if not isinstance(schema, dict) or depth > MAX_BRANCH_DEPTH:
            return schema is not False
        if id(schema) not in self._known:
            self._known[id(schema)] = True  # where a schema refers to itself
            self._known[id(schema)] = _allows_object(schema) and self._branches_fit(schema, depth)
        return self._known[id(schema)]

    def _branches_fit(self, schema: dict[str, Any], depth: int) -> bool:
        for name, wanted in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            items = schema.get(name)
            if isinstance(items, list) and items:
                fits = [self.fits(item, depth + 1) for item in items]
                if not wanted(fits):
                    return False
        return self.fits(_target(schema.get("$ref"), self._root), depth + 1)


def _allows_object(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return not isinstance(values, list) or any(isinstance(item, dict) for item in values)


def _target(ref: Any, root: Any) -> Any:
    """What a reference within a schema means; True, which takes all, where it means nothing."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return True
    found = root
    for part in ref[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return True
        found = found[name]
    return found


def _chosen_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise _wrong("tool_choice", "must be none, auto, required or an object with a function")
    return name


def _call_schema(index: int, function: dict[str, Any]) -> dict[str, Any]:
    """A call of one function, whose arguments are an object as its definition says."""
    arguments = {"type": "object", "$ref": f"#/$defs/{_definition_name(index)}"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _definition(index: int, function: dict[str, Any]) -> tuple[str, Any]:
    name = _definition_name(index)
    return name, _moved(function.get("parameters", {}), name)


def _definition_name(index: int) -> str:
    return f"tool{index}"


# Keywords whose value is no schema, whatever it looks like, or an object of schemas by name.
_LITERALS = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def _moved(schema: Any, name: str, is_named: bool = False) -> Any:
    """A schema that becomes definition ``name``: its references to its own parts follow it."""
    if isinstance(schema, list):
        return [_moved(item, name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if is_named:
        return {key: _moved(item, name) for key, item in schema.items()}
    moved = {
        key: item if key in _LITERALS else _moved(item, name, key in _NAMED)
        for key, item in schema.items()
        if key not in ("$id", "$schema")
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return moved


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}.", param=param)
