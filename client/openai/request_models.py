"""The bodies of the OpenAI endpoints: what is taken, and what is refused by name."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.client.errors import ShoalError

# Fields that change nothing at these values; at any other the request is refused, since dropping
# them silently would give an answer that was not asked for.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "moderation": (),
}

# Labels for the caller's own bookkeeping: they are meant to have no effect on the answer.
LABEL_FIELDS = ("user", "safety_identifier", "prompt_cache_key", "metadata")

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "ignore_eos",
    "kv_policy",
    "kv_budget",
    "n",
)
CHAT_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
MAX_METADATA = (16, 64, 512)  # pairs, and characters of their names and values
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 32  # of one prompt


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk
    include_obfuscation: bool | None = None


class RequestBody(BaseModel):
    """What all endpoints share. Ranges are checked by the backend; here only types and names."""

    model_config = ConfigDict(strict=True)
    neutral_values: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL_VALUES

    model: str

    def check(self) -> None:
        """What types do not say. Raises ShoalError (400)."""


class LabelledBody(RequestBody):
    """With labels for the caller's own bookkeeping: they have no effect on the answer."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    def check(self) -> None:
        most, name_length, value_length = MAX_METADATA
        pairs = self.metadata or {}
        if len(pairs) > most or any(
            len(name) > name_length or len(value) > value_length for name, value in pairs.items()
        ):
            raise ShoalError(
                f"metadata must hold at most {most} pairs, of names of at most {name_length} and "
                f"values of at most {value_length} characters.",
                400,
                "invalid_value",
                "metadata",
            )


class GenerationBody(LabelledBody):
    """What chat and text completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    kv_policy: str | None = None
    kv_budget: int | None = None
    n: int | None = None

    def check(self) -> None:
        LabelledBody.check(self)
        if self.stream_options is not None:
            _check_stream_options(self)
        _check_logprobs(self)
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise ShoalError(f"n must be in [1, {MAX_CHOICES}].", 400, None, "n")

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream is to have the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given, null ones left out."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values["logprobs"] = self.num_logprobs
        return {name: value for name, value in values.items() if value is not None}

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to report at each position; None: no log-probabilities."""
        raise NotImplementedError


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling(self) -> dict[str, Any]:
        values = GenerationBody.sampling(self)
        return values | given(self, CHAT_FIELDS)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def sampling(self) -> dict[str, Any]:
        values = GenerationBody.sampling(self)
        if self.echo and self.logprobs is not None:
            values["prompt_logprobs"] = self.logprobs
        return values


def given(body: BaseModel, names: Iterable[str]) -> dict[str, Any]:
    """The fields of these names that are not null."""
    values = {name: getattr(body, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


Body = TypeVar("Body", bound=RequestBody)


def parse_body(kind: type[Body], values: Any) -> Body:
    """Check types and names. Raises ShoalError (400) that names the field."""
    if not isinstance(values, dict):
        raise ShoalError("The body must be a JSON object.", 400, "invalid_type")
    values = {name: value for name, value in values.items() if not _is_neutral(kind, name, value)}
    # Before pydantic, which would make an error of every one of a million unknown fields.
    _check_known(kind, values, "")
    if isinstance(options := values.get("stream_options"), dict):
        _check_known(StreamOptions, options, "stream_options.")
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise _named_error(error) from None
    body.check()
    return body


def _check_known(kind: type[BaseModel], values: dict[str, Any], prefix: str) -> None:
    unknown = next((name for name in values if name not in kind.model_fields), None)
    if unknown is not None:
        param = prefix + unknown[:64]
        raise ShoalError(f"Unknown field {param!r}.", 400, "unknown_parameter", param)


def _is_neutral(kind: type[RequestBody], name: str, value: Any) -> bool:
    """Whether a field may be left out. Raises ShoalError when it would have to be obeyed."""
    if name in kind.model_fields or name not in kind.neutral_values:
        return value is None and name in LABEL_FIELDS
    allowed = kind.neutral_values[name]
    if value is None or any(value == item and _alike(value, item) for item in allowed):
        return True
    values = ", ".join(orjson.dumps(item).decode() for item in allowed)
    advice = f"Leave it out or set it to {values}." if allowed else "Leave it out."
    raise ShoalError(
        f"{name} is not supported with this value. {advice}",
        400,
        "unsupported_parameter",
        name,
    )


def _alike(value: Any, item: Any) -> bool:
    """Python takes true for 1, JSON does not."""
    return isinstance(value, bool) == isinstance(item, bool)


def _check_stream_options(body: GenerationBody) -> None:
    if not body.streams:
        raise ShoalError(
            "stream_options is only allowed with stream set to true.", 400, None, "stream_options"
        )
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise ShoalError(
            "stream_options.continuous_usage_stats needs include_usage set to true.",
            400,
            None,
            "stream_options.continuous_usage_stats",
        )
    if options is not None and options.include_obfuscation:
        raise ShoalError(
            "stream_options.include_obfuscation is not supported. Leave it out or set it to false.",
            400,
            "unsupported_parameter",
            "stream_options.include_obfuscation",
        )


def _check_logprobs(body: GenerationBody) -> None:
    is_chat = isinstance(body, ChatBody)
    param = "top_logprobs" if is_chat else "logprobs"
    count: int | None = getattr(body, param)
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ShoalError(f"{param} must be in [0, {MAX_TOP_LOGPROBS}].", 400, None, param)
    if is_chat and count is not None and body.num_logprobs is None:
        raise ShoalError("top_logprobs needs logprobs set to true.", 400, None, param)


def _named_error(error: ValidationError) -> ShoalError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union's failed branches, the one that got as far as an element says most.
    first = max(details, key=lambda detail: sum(isinstance(part, int) for part in detail["loc"]))
    # The field, then positions inside it; pydantic also puts the branches of a union there.
    param = str(first["loc"][0])[:64]
    for part in first["loc"][1:]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif param == "stream_options":
            param += f".{part[:64]}"
    if first["type"] == "missing":
        return ShoalError(f"{param} is missing.", 400, "missing_required_parameter", param)
    wanted = EXPECTED_TYPES.get(param.split("[")[0], first["msg"])
    return ShoalError(f"{param} {wanted}.", 400, "invalid_type", param)


_NUMBER, _WHOLE, _FLAG, _TEXT = (
    "must be a number",
    "must be a whole number",
    "must be true or false",
    "must be a string",
)
EXPECTED_TYPES = {
    "model": _TEXT,
    "messages": "must be a list of objects, each with a role and content",
    "stream": _FLAG,
    "stream_options": "must be an object",
    "stream_options.include_usage": _FLAG,
    "stream_options.continuous_usage_stats": _FLAG,
    "stream_options.include_obfuscation": _FLAG,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "typical_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "logit_bias": "must be an object from token id to number",
    "seed": "must be a whole number of 64 bits",
    "stop": "must be a string or a list of strings",
    "stop_token_ids": "must be a list of whole numbers",
    "response_format": "must be an object with a type",
    "guided_json": "must be a JSON schema, as an object or a string",
    "guided_regex": _TEXT,
    "guided_choice": "must be a list of strings",
    "guided_grammar": _TEXT,
    "max_tokens": _WHOLE,
    "max_completion_tokens": _WHOLE,
    "min_tokens": _WHOLE,
    "ignore_eos": _FLAG,
    "tools": "must be a list of objects",
    "tool_choice": "must be none, auto, required or an object with a function",
    "parallel_tool_calls": _FLAG,
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "chat_template_kwargs": "must be an object",
    "metadata": "must be an object from string to string",
    "add_special_tokens": _FLAG,
    "return_token_strs": _FLAG,
    "tokens": "must be a list of token ids",
    "input": "must be a string or a list",
    "instructions": _TEXT,
    "max_output_tokens": _WHOLE,
    "previous_response_id": _TEXT,
    "store": _FLAG,
    "text": "must be an object with a format",
    "include": "must be a list of strings",
    "dimensions": _WHOLE,
    "encoding_format": _TEXT,
    "pooling": _TEXT,
    "echo": _FLAG,
    "logprobs": "must be true or false in a chat, a whole number in a completion",
    "top_logprobs": _WHOLE,
    "kv_policy": _TEXT,
    "kv_budget": _WHOLE,
    "n": _WHOLE,
    "user": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
}
