"""From a decoded request to a validated prompt: whatever a client may get wrong ends here."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import orjson

from shoal.backend.grammar_compiler import GrammarCompiler, GrammarError
from shoal.backend.strict_json import non_finite_field
from shoal.backend.structured_output import FIELDS as GRAMMAR_FIELDS
from shoal.backend.structured_output import json_grammar, take_grammar, unusable_grammar
from shoal.backend.text.chat_template import ChatTemplate, parse_messages
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tool_parser import BARE, HERMES, ToolFormat, ToolParser
from shoal.backend.text.tools import FIELDS as TOOL_FIELDS
from shoal.backend.text.tools import ToolUse, take_tools
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sampling_params import MAX_CHOICES, SamplingParams
from shoal.scheduler.session_eviction import LRU

MAX_PROMPT_BYTES = 4 * 1024 * 1024  # whatever the context length
MAX_SAMPLING_BYTES = 256 * 1024  # with schemas and tools
MAX_JSON_DEPTH = 32
MAX_METADATA_LENGTH = 256  # characters
MAX_COMPILE_S = 10.0  # that a request waits for its grammar; one takes well under a second

# Request parameters that are about the way of a request, not about sampling.
METADATA_NAMES = frozenset(
    {"cache_salt", "request_id", "slo_class", "tenant", "timeout", "traceparent", "tracestate"}
)
# Of these, what a client may also write into its sampling parameters.
SAMPLING_METADATA_NAMES = ("slo_class", "timeout")
METADATA_PREFIXES = ("x-", "triton_")  # forwarded headers and Triton's own

ParameterValue = str | int | float | bool


@dataclass(slots=True)
class RawRequest:
    """The input tensors of one request, decoded but not checked. None: the tensor was not sent.

    ``messages`` and ``sampling_parameters`` hold JSON. ``parameters`` are Triton's request
    parameters; over gRPC they carry only bool, int and str, so ``"0.7"`` counts as 0.7 there.
    """

    text_input: str | bytes | None = None
    messages: str | bytes | None = None
    input_ids: list[int] | None = None
    stream: bool = False
    sampling_parameters: str | bytes | None = None
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_cached_tokens: bool = False
    return_token_ids: bool = False
    return_error: bool = False
    control: str | bytes | None = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be served. ``sampling`` has a number for max_tokens and a seed.

    ``prompt_text`` is what ``echo_input`` puts before the output (special tokens included).
    ``metadata`` holds the transport-level parameters, such as tenant and slo_class.
    """

    prompt_token_ids: list[int]
    prompt_text: str
    sampling: SamplingParams
    stream: bool
    echo_input: bool
    metadata: dict[str, ParameterValue]
    tool_use: ToolUse | None = None
    tool_format: ToolFormat = HERMES

    def make_tool_parser(self) -> ToolParser | None:
        """Of one choice; None where the answer may call nothing."""
        if self.tool_use is None:
            return None
        form = BARE if self.tool_use.must_call else self.tool_format
        return ToolParser(form, self.tool_use.names, self.tool_use.max_calls)


class Intake:
    """Checks requests of one model and turns them into token ids. Stateless, thread-safe.

    Raises RequestError, naming the field, for whatever cannot be served.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: int,
        vocab_size: int,
        default_sampling: Mapping[str, Any] | None = None,
        grammars: GrammarCompiler | None = None,
        max_choices: int = MAX_CHOICES,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._default_sampling = dict(default_sampling or {})
        self._grammars = grammars
        self._max_choices = max_choices

    def prepare(self, raw: RawRequest) -> PreparedRequest:
        """Validate, apply the chat template, tokenise, fill in max_tokens and seed."""
        source = _prompt_source(raw)
        values, metadata = _parameters(raw)
        tool_use = take_tools(values)
        if tool_use is not None and source != "messages":
            raise RequestError("tools need messages.", param="tools")
        sampling = self._sampling(values, tool_use)
        echo_input = _echo_input(raw, source)
        token_ids, text = self._prompt(raw, source, echo_input, tool_use)
        sampling = self._fill_in(sampling, len(token_ids), source)
        return PreparedRequest(
            token_ids,
            text,
            sampling,
            raw.stream,
            echo_input,
            metadata,
            tool_use,
            self._template.tool_format if self._template else HERMES,
        )

    def _prompt(
        self, raw: RawRequest, source: str, echo_input: bool, tool_use: ToolUse | None
    ) -> tuple[list[int], str]:
        if source == "input_ids":
            assert raw.input_ids is not None
            token_ids = self._check_input_ids(raw.input_ids)
            return token_ids, self._tokenizer.decode(token_ids) if echo_input else ""
        if source == "messages":
            return self._chat_prompt(raw, tool_use.tools if tool_use else ())
        text = _decode_text("text_input", raw.text_input)
        self._check_size(text, "text_input")
        return self._tokenizer.encode(text, add_bos=True), text

    def _chat_prompt(
        self, raw: RawRequest, tools: tuple[dict[str, Any], ...]
    ) -> tuple[list[int], str]:
        if self._template is None:
            raise RequestError(
                "This model has no chat template. Send text_input instead of messages.",
                param="messages",
                code="unsupported",
            )
        data = _decode_json("messages", raw.messages, MAX_PROMPT_BYTES)
        messages = parse_messages(data)
        # Before rendering too: a template takes its time over megabytes.
        self._check_size("".join(message["content"] for message in messages), "messages")
        rendered = self._template.render(messages, tools)
        self._check_size(rendered.text, "messages")
        return rendered.encode(self._tokenizer), rendered.text

    def _check_size(self, text: str, param: str) -> None:
        """Refuse what cannot fit before the tokeniser spends time on all of it."""
        if self._tokenizer.surely_exceeds(text, self._max_model_len):
            raise RequestError(
                f"The prompt of {len(text)} characters is longer than this model's context of "
                f"{self._max_model_len} tokens. Shorten it.",
                param=param,
                code="context_length_exceeded",
            )

    def _check_input_ids(self, token_ids: list[int]) -> list[int]:
        for idx, token_id in enumerate(token_ids[: self._max_model_len]):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(
                    "input_ids must hold whole numbers.", param="input_ids", code="invalid_type"
                )
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"input_ids[{idx}] must be in [0, {self._vocab_size - 1}].", param="input_ids"
                )
        return list(token_ids)

    def _sampling(self, values: dict[str, Any], tool_use: ToolUse | None) -> SamplingParams:
        values = _without_overridden(self._default_sampling, values) | values
        grammar = take_grammar(values)
        if tool_use is not None and tool_use.must_call:
            if grammar is not None:
                raise RequestError(
                    "tool_choice that forces a call cannot be used with structured output.",
                    param="tool_choice",
                )
            grammar = json_grammar("tools", tool_use.schema())
        sampling = SamplingParams.from_dict(values)
        if grammar is not None:
            _check_free_end(sampling)
            self._compile(grammar)
            sampling = replace(sampling, grammar=grammar)
        if sampling.n > self._max_choices:
            raise RequestError(f"n must be in [1, {self._max_choices}].", param="n")
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        self._check_vocabulary("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
        return sampling

    def _compile(self, grammar: str) -> None:
        """Compile as the worker will, so that a refusal comes before anything else is done."""
        if self._grammars is None:
            return
        try:
            self._grammars.compile(grammar).result(MAX_COMPILE_S)
        except GrammarError as error:
            raise unusable_grammar("The grammar", str(error)) from None
        except TimeoutError:
            raise RequestError(
                "Too many grammars are being compiled. Try again.",
                code="overloaded",
                status=503,
                retry_after_ms=1000,
            ) from None

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        if any(token_id >= self._vocab_size for token_id in token_ids):
            raise RequestError(
                f"{name}: token ids must be in [0, {self._vocab_size - 1}].", param=name
            )

    def _fill_in(self, sampling: SamplingParams, num_prompt: int, source: str) -> SamplingParams:
        if num_prompt == 0:
            raise RequestError(f"{source} is empty. Send at least one token.", param=source)
        room = self._max_model_len - num_prompt
        if room < 1:
            raise RequestError(
                f"The prompt has {num_prompt} tokens; this model takes at most "
                f"{self._max_model_len - 1} and one of output. Shorten it.",
                param=source,
                code="context_length_exceeded",
            )
        for name, value in (
            ("max_tokens", sampling.max_tokens),
            ("min_tokens", sampling.min_tokens),
        ):
            if value is not None and value > room:
                raise RequestError(
                    f"{name} must be at most {room}: the prompt takes {num_prompt} tokens of this "
                    f"model's context of {self._max_model_len}.",
                    param=name,
                    code="context_length_exceeded",
                )
        return replace(
            sampling,
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        )


def _parameters(raw: RawRequest) -> tuple[dict[str, Any], dict[str, ParameterValue]]:
    """What a request says about sampling, and about itself."""
    values: dict[str, Any] = {}
    metadata: dict[str, ParameterValue] = {}
    for name, value in raw.parameters.items():
        if name in METADATA_NAMES or name.startswith(METADATA_PREFIXES):
            metadata[name] = _check_metadata(name, value)
        else:
            values[name] = _parameter_value(name, value)
    if raw.sampling_parameters is None:
        return values, metadata
    data = _decode_json("sampling_parameters", raw.sampling_parameters, MAX_SAMPLING_BYTES)
    if not isinstance(data, dict):
        raise RequestError(
            "sampling_parameters must be a JSON object.",
            param="sampling_parameters",
            code="invalid_type",
        )
    for name in SAMPLING_METADATA_NAMES:
        value = data.pop(name, None)
        if value is not None:
            metadata.setdefault(name, _check_metadata(name, value))
    return _without_overridden(values, data) | data, metadata


def _prompt_source(raw: RawRequest) -> str:
    given = [
        name for name in ("text_input", "messages", "input_ids") if getattr(raw, name) is not None
    ]
    if len(given) != 1:
        found = "none" if not given else " and ".join(given)
        raise RequestError(
            f"Send exactly one of text_input, messages and input_ids (found {found}).",
            param=given[1] if given else "text_input",
            code="invalid_value" if given else "missing_parameter",
        )
    return given[0]


def _echo_input(raw: RawRequest, source: str) -> bool:
    """As NVIDIA's vllm_backend: text_input without streaming is echoed unless excluded."""
    if raw.exclude_input_in_output is None:
        return source == "text_input" and not raw.stream
    return not raw.exclude_input_in_output


_MAX_TOKENS_ALIASES = frozenset({"max_tokens", "max_completion_tokens", "max_new_tokens"})
_FIELD_NAMES = (
    frozenset(item.name for item in fields(SamplingParams))
    | _MAX_TOKENS_ALIASES
    | {"response_format", "guided_choice", *TOOL_FIELDS}
)


def _check_free_end(sampling: SamplingParams) -> None:
    """Structured text ends where its grammar says."""
    for name, is_set in (
        ("ignore_eos", sampling.ignore_eos),
        ("min_tokens", sampling.min_tokens > 0),
    ):
        if is_set:
            raise RequestError(
                f"{name} cannot be used with structured output ({', '.join(GRAMMAR_FIELDS)}). "
                "Leave it out.",
                param=name,
            )


def _without_overridden(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """``lower`` without what ``upper`` says under the same or another name for the same thing."""
    overridden: set[str] = set()
    if any(upper.get(name) is not None for name in _MAX_TOKENS_ALIASES):
        overridden |= _MAX_TOKENS_ALIASES
    if upper.get("kv_policy") == LRU:
        overridden.add("kv_budget")
    return {name: value for name, value in lower.items() if name not in overridden}


def _parameter_value(name: str, value: ParameterValue) -> Any:
    """A number, boolean or list written as a string: Triton's parameters cannot carry all types."""
    if not isinstance(value, str) or name == "stop" or name not in _FIELD_NAMES:
        return value
    if len(value) > MAX_SAMPLING_BYTES:
        raise RequestError(f"{name} is too long.", param=name)
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value  # SamplingParams says what type it should be


def _check_metadata(name: str, value: ParameterValue) -> ParameterValue:
    if isinstance(value, str) and len(value) > MAX_METADATA_LENGTH:
        raise RequestError(
            f"{name[:64]} must have at most {MAX_METADATA_LENGTH} characters.", param=name[:64]
        )
    return value


def _decode_text(name: str, value: str | bytes | None) -> str:
    assert value is not None
    if len(value) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"{name} must have at most {MAX_PROMPT_BYTES} bytes.",
            param=name,
            code="context_length_exceeded",
        )
    try:
        # A lone surrogate cannot be tokenised, so it must not pass as a str either.
        return value.decode() if isinstance(value, bytes) else value.encode().decode()
    except UnicodeError:
        raise RequestError(f"{name} must be valid UTF-8 text.", param=name) from None


def _decode_json(name: str, value: str | bytes | None, max_bytes: int) -> Any:
    """Decode JSON with bounded size and depth. NaN and Infinity are not JSON."""
    assert value is not None
    if len(value) > max_bytes:
        raise RequestError(f"{name} must have at most {max_bytes} bytes.", param=name)
    try:
        data = orjson.loads(value)
    except (orjson.JSONDecodeError, UnicodeError):
        raise _not_json(name, value) from None
    _check_depth(name, data)
    return data


def _not_json(name: str, value: str | bytes) -> RequestError:
    culprit = non_finite_field(value)
    if culprit is not None:
        return RequestError(
            f"{culprit[:64]} must be a finite number; NaN and Infinity are not JSON.",
            param=culprit[:64],
        )
    return RequestError(f"{name} must be valid JSON.", param=name, code="invalid_json")


def _check_depth(name: str, data: Any) -> None:
    level = [data]
    for _ in range(MAX_JSON_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise RequestError(f"{name} must be nested at most {MAX_JSON_DEPTH} levels deep.", param=name)
