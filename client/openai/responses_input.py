"""The body of /v1/responses, and the chat that it stands for."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from shoal.client.errors import ShoalError
from shoal.client.openai.request_models import MAX_TOP_LOGPROBS, LabelledBody, given

LOGPROBS = "message.output_text.logprobs"
MAX_ITEMS = 1024
ROLES = ("user", "assistant", "system", "developer")
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "kv_policy",
    "kv_budget",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "parallel_tool_calls",
    "chat_template_kwargs",
)
# As in request_models: other values would have to be obeyed.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "reasoning": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
}
# What the backend calls them, and what they are called here.
CALLERS_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class ResponsesBody(LabelledBody):
    """POST /v1/responses. The fields beside OpenAI's are those of chat completions."""

    neutral_values: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL_VALUES

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    kv_policy: str | None = None
    kv_budget: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    text: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        LabelledBody.check(self)
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise _wrong("top_logprobs", f"must be in [0, {MAX_TOP_LOGPROBS}]")
        if any(wish != LOGPROBS for wish in self.include or ()):
            raise _wrong("include", f"may hold {LOGPROBS} only")

    def sampling(self) -> dict[str, Any]:
        """The backend's sampling parameters."""
        values = given(self, SAMPLING_FIELDS)
        if self.max_output_tokens is not None:
            values["max_completion_tokens"] = self.max_output_tokens
        if self.include:
            values["logprobs"] = self.top_logprobs or 0
        if self.tools:
            values["tools"] = [
                _chat_tool(tool, f"tools[{idx}]") for idx, tool in enumerate(self.tools)
            ]
        if self.tool_choice is not None:
            values["tool_choice"] = _chat_tool_choice(self.tool_choice)
        text_format = self._text_format()
        if text_format["type"] == "json_object":
            values["response_format"] = text_format
        elif text_format["type"] == "json_schema":
            schema = {name: value for name, value in text_format.items() if name != "type"}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif text_format["type"] != "text":
            raise _wrong("text.format.type", "must be text, json_object or json_schema")
        return values

    def _text_format(self) -> dict[str, Any]:
        text = self.text or {}
        unknown = next((name for name in text if name not in ("format", "verbosity")), None)
        if unknown is not None:
            raise _unknown(f"text.{unknown[:64]}")
        if text.get("verbosity") not in (None, "medium"):
            raise _wrong("text.verbosity", "is not supported with this value. Leave it out")
        found = text.get("format")
        if found is None:
            return {"type": "text"}
        if not isinstance(found, dict) or not isinstance(found.get("type"), str):
            raise _wrong("text.format", "must be an object with a type")
        return found

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat, instructions and earlier turns left out."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not 1 <= len(self.input) <= MAX_ITEMS:
            raise _wrong("input", f"must hold 1 to {MAX_ITEMS} items")
        found: list[dict[str, Any]] = []
        for idx, item in enumerate(self.input):
            _add_item(found, item, f"input[{idx}]")
        return found

    def echo(self) -> dict[str, Any]:
        """What a response object repeats of its request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": self._text_format()},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [
                {"description": None, "parameters": None, "strict": True, **tool}
                for tool in self.tools or ()
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            **given(self, ("user", "safety_identifier", "prompt_cache_key")),  # never null
        }


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Calls that follow one another, or their message, are of one turn."""
    if not isinstance(item, dict):
        raise _wrong(where, "must be an object")
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in ROLES:
            raise _wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        content = _content(item.get("content"), f"{where}.content")
        messages.append({"role": item["role"], "content": content})
    elif kind == "function_call":
        call = {
            "id": _text(item, "call_id", where),
            "type": "function",
            "function": {
                "name": _text(item, "name", where),
                "arguments": _text(item, "arguments", where),
            },
        }
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        call_id = _text(item, "call_id", where)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind != "reasoning":  # templates leave out earlier thoughts
        raise _wrong(
            f"{where}.type",
            "must be message, function_call, function_call_output or reasoning",
        )


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "must be a string or a list of parts")
    return [_part(part, f"{where}[{idx}]") for idx, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    kinds = ("input_text", "output_text", "text", "refusal", "input_image")
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise _wrong(f"{where}.type", f"must be one of {', '.join(kinds)}")
    if kind == "input_image":
        url = {"url": _text(part, "image_url", where), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": url}
    return {"type": "text", "text": _text(part, "refusal" if kind == "refusal" else "text", where)}


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "must be a string")
    return value


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _wrong(f"{where}.type", "must be function")
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _chat_tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise _wrong("tool_choice", "must be none, auto, required or a function with its name")
    return {"type": "function", "function": {"name": choice["name"]}}


def _wrong(param: str, what: str) -> ShoalError:
    return ShoalError(f"{param} {what}.", 400, "invalid_value", param)


def _unknown(param: str) -> ShoalError:
    return ShoalError(f"Unknown field {param!r}.", 400, "unknown_parameter", param)
