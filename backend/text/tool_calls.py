"""Calls of tools in a model's text, found as the text comes."""

import json
import re
from dataclasses import dataclass
from typing import Any

from shoal.backend.strict_json import MAX_DEPTH, sound_json

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the last call's arguments; joined, they are a JSON object."""

    text: str


Event = Content | CallStart | CallArguments


class JsonScanner:
    """Tells where a JSON value ends, one character at a time."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, char: str) -> bool:
        """Whether the object, list or string that began first is complete with ``char``."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class JsonCalls:
    """Calls as JSON objects with a name and arguments, one, several or in a list.

    Where the name comes first, as it mostly does, arguments are passed on as they come.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = ""  # the head of an object, until its arguments begin
        self._object = JsonScanner()
        self._arguments: JsonScanner | None = None
        self._is_in_object = False
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Take more text. What is outside of objects (commas, brackets, space) is dropped."""
        events: list[Event] = []
        passed = ""
        for char in text:
            if not self._is_in_object:
                if char == "{":
                    self._begin(char)
                continue
            is_complete = self._object.push(char)
            if self._arguments is not None:
                passed += char
                if self._arguments.push(char):
                    self._arguments = None
                    events.append(CallArguments(passed))
                    passed = ""
            elif is_complete:
                events += self._end_of_object(char)
            elif self._buffer:
                events += self._head(char)
            self._is_in_object = not is_complete
        return [*events, CallArguments(passed)] if passed else events

    @property
    def is_cut(self) -> bool:
        """Whether the last call's arguments have begun and not ended."""
        return self._arguments is not None

    def flush(self) -> list[Event]:
        """The text is at its end: what was held of an object that is no call yet."""
        held, self._buffer = self._buffer, ""
        return [Content(held)] if held else []

    def _begin(self, char: str) -> None:
        self._is_in_object = True
        self._object = JsonScanner()
        self._object.push(char)
        self._buffer = char

    def _head(self, char: str) -> list[Event]:
        """Look for the name, and for the brace that begins the arguments."""
        match = _HEAD.fullmatch(self._buffer) if char == "{" else None
        name = _decoded(match.group(1)) if match else None
        if name not in self._names:
            self._buffer += char
            return []
        self._buffer = ""
        self._arguments = JsonScanner()
        self._arguments.push(char)
        self.num_calls += 1
        return [CallStart(str(name)), CallArguments(char)]

    def _end_of_object(self, char: str) -> list[Event]:
        if not self._buffer:
            return []  # of a call whose arguments have gone out
        text, self._buffer = self._buffer + char, ""
        value = _decoded(text)
        call = _call_of(value) if isinstance(value, dict) else None
        if call is None or call[0] not in self._names:
            return [Content(text)]
        self.num_calls += 1
        return [CallStart(call[0]), CallArguments(call[1])]


def _call_of(value: dict[str, Any]) -> tuple[str, str] | None:
    """Name and arguments, whatever their order; arguments may be a string of JSON."""
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _decoded(text: str) -> Any:
    try:
        return sound_json(text)
    except ValueError:
        return None


class GemmaCalls:
    """Gemma 4's form: ``call:name{key:<|"|>text<|"|>,other:[1,true]}``, known when complete."""

    is_cut = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._buffer = ""
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Take more text."""
        self._buffer += text
        return []

    def flush(self) -> list[Event]:
        """The call, or the text if it is none."""
        text, self._buffer = self._buffer, ""
        match = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", text, re.DOTALL)
        if match and match.group(1) in self._names:
            try:
                arguments = _GemmaReader(match.group(2)).read()
            except (ValueError, IndexError):
                arguments = None
            if arguments is not None:
                self.num_calls += 1
                encoded = json.dumps(arguments, ensure_ascii=False)
                return [CallStart(match.group(1)), CallArguments(encoded)]
        return [Content(text)] if text else []


class _GemmaReader:
    """Objects with bare keys, and strings between ``<|"|>``."""

    _QUOTE = '<|"|>'

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> dict[str, Any]:
        """The object that the whole text is. Raises ValueError or IndexError."""
        value = self._value(0)
        if self._at != len(self._text) or not isinstance(value, dict):
            raise ValueError("not one object")
        return value

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            return self._list(depth)
        if self._take(self._QUOTE):
            end = self._text.index(self._QUOTE, self._at)
            start, self._at = self._at, end + len(self._QUOTE)
            return self._text[start:end]
        match = re.compile(r"[^,\]}]+").match(self._text, self._at)
        if match is None:
            raise ValueError("no value")
        self._at = match.end()
        return sound_json(match.group())

    def _object(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self._take("}"):
            quoted = self._take(self._QUOTE)
            end = self._text.index(self._QUOTE if quoted else ":", self._at)
            key, self._at = self._text[self._at : end].strip(), end + (5 if quoted else 0)
            if not self._take(":"):
                raise ValueError("a key without a value")
            items[key] = self._value(depth + 1)
            self._take(",")
        return items

    def _list(self, depth: int) -> list[Any]:
        items = []
        while not self._take("]"):
            items.append(self._value(depth + 1))
            self._take(",")
        return items

    def _take(self, token: str) -> bool:
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True
