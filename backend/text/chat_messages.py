"""Chat messages as clients send them: checked, and in the form that templates take."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from shoal.backend.strict_json import sound_json
from shoal.scheduler.errors import RequestError

MAX_MESSAGES = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
# Clients send an assistant's message back as they got it, with all that they keep of it. What of
# that says the same twice, or nothing, is left out; what a model would have to obey must be null.
_ANSWER_KEYS = ("refusal", "reasoning_content", "annotations", "parsed", "audio", "function_call")
_REPEATED_KEYS = ("annotations", "parsed")
_NULL_KEYS = ("audio", "function_call")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Where messages have an image. Without a url it comes beside the messages."""

    url: str | None
    param: str


def parse_messages(
    data: Any,
    images: list[ImagePart] | None = None,
    part_roles: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Check decoded JSON and return the messages as templates want them: content is a string.

    A list of text parts is joined as it is, but in messages of ``part_roles``; null content becomes
    empty. ``developer`` is OpenAI's newer word for ``system``, which templates know. For models
    that see images the content of a user's message with images stays a list of parts, and these
    images are added to ``images``.
    """
    if not isinstance(data, list):
        raise RequestError("messages must be a list.", param="messages", code="invalid_type")
    if not 1 <= len(data) <= MAX_MESSAGES:
        raise RequestError(f"messages must hold 1 to {MAX_MESSAGES} messages.", param="messages")
    return [
        _parse_message(item, f"messages[{idx}]", images, part_roles)
        for idx, item in enumerate(data)
    ]


def _parse_message(
    item: Any, where: str, images: list[ImagePart] | None, part_roles: Collection[str]
) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"{where} must be an object.", param=where, code="invalid_type")
    role = item.get("role")
    known = (*_KEYS, *_ANSWER_KEYS) if role == "assistant" else _KEYS
    for key in item:
        if key not in known:
            raise RequestError(
                f"{where} has an unknown field {key[:64]!r}. Allowed: {', '.join(_KEYS)}.",
                param=f"{where}.{key[:64]}",
                code="unknown_parameter",
            )
    if role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role"
        )
    if role == "assistant":
        item = _as_written(item, where)
    message = {key: value for key, value in item.items() if value is not None}
    message["role"] = "system" if role == "developer" else role
    content = _parse_content(item, where, images if role == "user" else None)
    message["content"] = content if message["role"] in part_roles else joined_text(content)
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            raise _wrong_type(f"{where}.{key}", "a string")
    if "tool_calls" in message:
        message["tool_calls"] = _parse_tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def _as_written(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An assistant's message with what it said alone; a refusal is what it said."""
    for key in _NULL_KEYS:
        if item.get(key) is not None:
            raise RequestError(
                f"{where}.{key} is not supported: leave it out.",
                param=f"{where}.{key}",
                code="unsupported",
            )
    refusal = item.get("refusal")
    if not isinstance(refusal, str | None):
        raise _wrong_type(f"{where}.refusal", "a string or null")
    left_out = ("refusal", *_REPEATED_KEYS, *_NULL_KEYS)
    message = {key: value for key, value in item.items() if key not in left_out}
    return message | {"content": refusal} if refusal and not item.get("content") else message


def _parse_content(
    item: dict[str, Any], where: str, images: list[ImagePart] | None
) -> str | list[dict[str, str]]:
    content = item.get("content")
    where = f"{where}.content"
    if content is None:
        if item["role"] != "assistant":
            raise RequestError(
                f"{where} is missing: send a string or a list of text parts.",
                param=where,
                code="missing_parameter",
            )
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_type(where, "a string or a list of text parts")
    if item["role"] == "assistant":
        content = [_refusal_as_text(part) for part in content]
    return [_parse_part(part, f"{where}[{idx}]", images) for idx, part in enumerate(content)]


def joined_text(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    """The text of text parts; what holds an image stays as it is."""
    if isinstance(content, str) or any(part["type"] == "image" for part in content):
        return content
    return "".join(part["text"] for part in content)


def _refusal_as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


def _parse_part(part: Any, where: str, images: list[ImagePart] | None) -> dict[str, str]:
    if not isinstance(part, dict):
        raise _wrong_type(where, "an object")
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise _wrong_type(f"{where}.text", "a string")
        return {"type": "text", "text": part["text"]}
    if images is None or kind not in ("image", "image_url"):
        allowed, reason = "'text'", "this model takes text only"
        if images is not None:
            allowed, reason = "'text', 'image_url' or 'image'", "this model takes no other"
        raise RequestError(
            f"{where}.type must be {allowed}: {reason}.",
            param=f"{where}.type",
            code="unsupported",
        )
    images.append(_parse_image(part, where))
    return {"type": "image"}


def _parse_image(part: dict[str, Any], where: str) -> ImagePart:
    if part["type"] == "image":
        return ImagePart(None, where)
    where = f"{where}.image_url"
    value = part.get("image_url")
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        raise _wrong_type(where, "an object with a url")
    if value.get("detail", "auto") not in ("auto", None):
        raise RequestError(
            f"{where}.detail must be 'auto': the model's own size is used.",
            param=f"{where}.detail",
            code="unsupported",
        )
    return ImagePart(value["url"], f"{where}.url")


def _parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Templates want arguments as an object; OpenAI clients send them as a string of JSON."""
    if not isinstance(calls, list):
        raise _wrong_type(where, "a list")
    parsed = []
    for idx, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong_type(f"{where}[{idx}].function", "an object with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json_object(arguments)
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _json_object(text: str) -> Any:
    """The object that ``text`` spells, else the text itself."""
    try:
        value = sound_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _wrong_type(where: str, wanted: str) -> RequestError:
    return RequestError(f"{where} must be {wanted}.", param=where, code="invalid_type")
