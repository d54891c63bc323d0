"""From a decoded request to a validated prompt: whatever a client may get wrong ends here."""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import orjson

from shoal.backend.grammar_compiler import GrammarCompiler, GrammarError
from shoal.backend.image_prompt import ImagePrompter
from shoal.backend.images import MAX_PIXELS
from shoal.backend.prompter import ChatUse, Prompter
from shoal.backend.raw_request import MAX_PROMPT_BYTES as MAX_PROMPT_BYTES
from shoal.backend.raw_request import ParameterValue as ParameterValue
from shoal.backend.raw_request import RawRequest as RawRequest
from shoal.backend.raw_request import decode_json, prompt_source
from shoal.backend.structured_output import FIELDS as GRAMMAR_FIELDS
from shoal.backend.structured_output import json_grammar, take_grammar, unusable_grammar
from shoal.backend.text.chat_template import ChatTemplate
from shoal.backend.text.reasoning import ReasoningParser, opens_thought
from shoal.backend.text.template_options import FIELDS as TEMPLATE_FIELDS
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tool_parser import BARE, HERMES, ToolFormat, ToolParser
from shoal.backend.text.tools import FIELDS as TOOL_FIELDS
from shoal.backend.text.tools import ToolUse
from shoal.scheduler.errors import RequestError, context_exceeded
from shoal.scheduler.images import PromptImage
from shoal.scheduler.sampling_params import MAX_CHOICES, SamplingParams
from shoal.scheduler.session_eviction import LRU

MAX_CHOICE_PIXELS = 4 * MAX_PIXELS  # each choice takes its images to the worker
MAX_SAMPLING_BYTES = 256 * 1024  # with schemas and tools
MAX_METADATA_LENGTH = 256  # characters
MAX_COMPILE_S = 10.0  # that a request waits for its grammar; one takes well under a second

# Request parameters that are about the way of a request, not about sampling.
METADATA_NAMES = frozenset(
    {
        "cache_salt",
        "num_prompts",
        "request_id",
        "slo_class",
        "tenant",
        "timeout",
        "traceparent",
        "tracestate",
    }
)
# Of these, what a client may also write into its sampling parameters.
SAMPLING_METADATA_NAMES = ("slo_class", "timeout")
METADATA_PREFIXES = ("x-", "triton_")  # forwarded headers and Triton's own


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be served. ``sampling`` has a number for max_tokens and a seed.

    ``prompt_text`` is what ``echo_input`` puts before the output (special tokens included); of
    token ids it is set only where it is wanted.
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
    images: tuple[PromptImage, ...] = ()
    starts_in_thought: bool | None = None  # None: the answer has no thoughts to part from it

    def make_reasoning_parser(self) -> ReasoningParser | None:
        """Of one choice."""
        return None if self.starts_in_thought is None else ReasoningParser(self.starts_in_thought)

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
        images: ImagePrompter | None = None,
        hidden_size: int = 0,
    ) -> None:
        self.prompter = Prompter(tokenizer, template, max_model_len, vocab_size, images)
        self._template = template
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._default_sampling = dict(default_sampling or {})
        self._grammars = grammars
        self._max_choices = max_choices
        self._hidden_size = hidden_size  # 0: unknown

    def prepare(self, raw: RawRequest, salt: bytes = b"") -> PreparedRequest:
        """Validate, apply the chat template, tokenise, fill in max_tokens and seed. What was done
        for one request makes no other sooner but of the same salt."""
        values, metadata = _parameters(raw)
        names = [name for name in _OTHER_NAMES if values.get(name) is not None]
        try:
            return self._prepare(raw, values, metadata, salt)
        except RequestError as error:
            raise (_renamed(error, names[0]) if names else error) from None

    def _prepare(
        self,
        raw: RawRequest,
        values: dict[str, Any],
        metadata: dict[str, ParameterValue],
        salt: bytes,
    ) -> PreparedRequest:
        source = prompt_source(raw)
        use = ChatUse.take(values, source)
        sampling = self._sampling(values, use.tool_use)
        echo_input = _echo_input(raw, source)
        wants_text = echo_input or sampling.prompt_logprobs is not None
        token_ids, text, images = self.prompter.prompt(raw, source, wants_text, use, salt)
        if images:
            _check_goes_with_images(sampling, images)
        sampling = self._fill_in(sampling, len(token_ids), source)
        template = self._template if source == "messages" else None
        splits = template is not None and template.has_reasoning and sampling.grammar is None
        return PreparedRequest(
            token_ids,
            text,
            sampling,
            raw.stream,
            echo_input,
            metadata,
            use.tool_use,
            template.tool_format if template else HERMES,
            images,
            opens_thought(text) if splits and not use.options.continues else None,
        )

    def tokenize(self, raw: RawRequest, add_special_tokens: bool | None) -> list[int]:
        """The ids of text or of a chat; see Prompter."""
        values, _ = _parameters(raw)
        return self.prompter.tokenize(raw, values, add_special_tokens)

    def _sampling(self, values: dict[str, Any], tool_use: ToolUse | None) -> SamplingParams:
        if values.get("pooling") is None:  # the defaults are about text
            values = _without_overridden(self._default_sampling, values) | values
        source = next((name for name in GRAMMAR_FIELDS if values.get(name) is not None), "")
        grammar = take_grammar(values)
        if tool_use is not None and tool_use.must_call:
            if grammar is not None:
                raise RequestError(
                    "tool_choice that forces a call cannot be used with structured output.",
                    param="tool_choice",
                )
            source, grammar = "tools", json_grammar("tools", tool_use.schema())
        sampling = SamplingParams.from_dict(values)
        if grammar is not None:
            _check_free_end(sampling)
            self._compile(source, grammar)
            sampling = replace(sampling, grammar=grammar, grammar_param=source)
        if sampling.n > self._max_choices:
            raise RequestError(f"n must be in [1, {self._max_choices}].", param="n")
        if self._hidden_size and (sampling.dimensions or 0) > self._hidden_size:
            raise RequestError(
                f"dimensions must be in [1, {self._hidden_size}].", param="dimensions"
            )
        self._check_vocabulary("stop_token_ids", sampling.stop_token_ids)
        self._check_vocabulary("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
        return sampling

    def _compile(self, source: str, grammar: str) -> None:
        """Compile what the field ``source`` asks for, as the worker will: so a refusal comes before
        anything else is done."""
        if self._grammars is None:
            return
        try:
            self._grammars.compile(grammar).result(MAX_COMPILE_S)
        except GrammarError as error:
            raise unusable_grammar(source, str(error)) from None
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
            what = f"The prompt has {num_prompt}, and one of output is needed: shorten it."
            raise context_exceeded(self._max_model_len, what, source)
        for name, value in (
            ("max_tokens", sampling.max_tokens),
            ("min_tokens", sampling.min_tokens),
        ):
            if value is not None and value > room:
                what = f"{name} must be at most {room}, since the prompt takes {num_prompt}."
                raise context_exceeded(self._max_model_len, what, name)
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if sampling.pooling is not None:
            max_tokens = 0
        return replace(
            sampling,
            max_tokens=max_tokens,
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
    data = decode_json("sampling_parameters", raw.sampling_parameters, MAX_SAMPLING_BYTES)
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


def _echo_input(raw: RawRequest, source: str) -> bool:
    """As NVIDIA's vllm_backend: text_input without streaming is echoed unless excluded."""
    if raw.exclude_input_in_output is None:
        return source == "text_input" and not raw.stream
    return not raw.exclude_input_in_output


_MAX_TOKENS_ALIASES = frozenset({"max_tokens", "max_completion_tokens", "max_new_tokens"})
_OTHER_NAMES = ("max_completion_tokens", "max_new_tokens")  # the first that is given counts
_FIELD_NAMES = (
    frozenset(item.name for item in fields(SamplingParams))
    | _MAX_TOKENS_ALIASES
    | {"response_format", "guided_choice", *TOOL_FIELDS, *TEMPLATE_FIELDS}
)


def _renamed(error: RequestError, name: str) -> RequestError:
    """The error of max_tokens by the name that the client gave it."""
    message = re.sub(r"\bmax_tokens\b", name, error.message)
    param = name if error.param == "max_tokens" else error.param
    return replace(error, message=message, param=param)


def _check_nothing_left(values: dict[str, Any]) -> None:
    for name in values:
        raise RequestError(
            f"{name[:64]} means nothing here. Leave it out.",
            param=name[:64],
            code="unknown_parameter",
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


def _check_goes_with_images(sampling: SamplingParams, images: tuple[PromptImage, ...]) -> None:
    for name, is_set in (
        ("prompt_logprobs", sampling.prompt_logprobs is not None),
        ("kv_budget", sampling.kv_budget is not None),
        ("pooling", sampling.pooling is not None),
    ):
        if is_set:
            raise RequestError(f"{name} cannot be used with images. Leave it out.", param=name)
    num_pixels = sum(image.height * image.width for image in images)
    if sampling.n * num_pixels > MAX_CHOICE_PIXELS:
        raise RequestError(
            f"n times the pixels of all images must be at most {MAX_CHOICE_PIXELS}.", param="n"
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
