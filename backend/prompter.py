"""Prompts as token ids: chat template, tokeniser, and the limits on both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.backend.image_prompt import ImagePrompter
from shoal.backend.images import MAX_BYTES, DecodedImage
from shoal.backend.prompt_memo import PromptMemo
from shoal.backend.raw_request import (
    MAX_PROMPT_BYTES,
    RawRequest,
    decode_json,
    decode_text,
    prompt_source,
)
from shoal.backend.text.chat_messages import ImagePart, parse_messages
from shoal.backend.text.chat_template import ChatTemplate
from shoal.backend.text.template_options import FIELDS as TEMPLATE_FIELDS
from shoal.backend.text.template_options import TemplateOptions, take_template_options
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.text.tools import ToolUse, take_tools
from shoal.scheduler.errors import RequestError, context_exceeded
from shoal.scheduler.images import PromptImage

MAX_IMAGE_BYTES = 3 * MAX_BYTES  # of all images in messages, as base64

Images = tuple[PromptImage, ...]


@dataclass(frozen=True, slots=True)
class ChatUse:
    """What the sampling parameters say about the prompt rather than about sampling."""

    tool_use: ToolUse | None
    options: TemplateOptions

    @classmethod
    def take(cls, values: dict[str, Any], source: str) -> "ChatUse":
        """Remove these fields from ``values``. Raises RequestError, naming the field."""
        given = [name for name in TEMPLATE_FIELDS if values.get(name) is not None]
        tool_use, options = take_tools(values), take_template_options(values)
        if source != "messages" and tool_use is not None:
            raise RequestError("tools need messages.", param="tools")
        if source != "messages" and options != TemplateOptions():
            raise RequestError(f"{' and '.join(given)} need messages.", param=given[0])
        return cls(tool_use, options)


class Prompter:
    """Makes the prompts of one model. Stateless, thread-safe. Raises RequestError."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: int,
        vocab_size: int,
        images: ImagePrompter | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._images = images
        self._memo = PromptMemo()

    def prompt(
        self, raw: RawRequest, source: str, wants_text: bool, use: ChatUse, salt: bytes = b""
    ) -> tuple[list[int], str, Images]:
        """Token ids, the text where it is known or must be echoed, and images. Only what came with
        this salt before is encoded sooner."""
        if raw.images is not None:
            self._check_images(raw.images, source)
        if source == "input_ids":
            assert raw.input_ids is not None
            token_ids = self._check_input_ids(raw.input_ids, self.max_model_len)
            return token_ids, self._tokenizer.decode(token_ids) if wants_text else "", ()
        if source == "messages":
            return self._chat(raw, use, is_limited=True, salt=salt)
        text = decode_text("text_input", raw.text_input)
        self._check_size(text, "text_input")
        if not raw.images or self._images is None:
            token_ids = self._memo.encode(
                salt, "text", text, lambda: self._tokenizer.encode(text, add_bos=True)
            )
            return token_ids, text, ()
        placed = self._images.place(text, len(raw.images))
        decoded = self._images.decode_files(raw.images)
        token_ids = self._tokenizer.encode(
            self._images.expand(placed, decoded, source), add_bos=True
        )
        return token_ids, text, self._images.locate(token_ids, decoded, source)

    def tokenize(
        self, raw: RawRequest, values: Mapping[str, Any], add_special_tokens: bool | None
    ) -> list[int]:
        """The ids of text or of a chat, however many: they are counted, not run.

        ``values`` are the sampling parameters. ``add_special_tokens``: see TextRequest.
        """
        source = prompt_source(raw)
        if source == "input_ids":
            raise RequestError("Send text_input or messages to tokenize.", param="input_ids")
        left = dict(values)
        use = ChatUse.take(left, source)
        for name in left:
            raise RequestError(
                f"{name[:64]} means nothing here. Leave it out.",
                param=name[:64],
                code="unknown_parameter",
            )
        if source == "text_input":
            text = decode_text("text_input", raw.text_input)
            return self._tokenizer.encode(text, add_bos=add_special_tokens is not False)
        token_ids, _, _ = self._chat(raw, use, is_limited=False)
        bos = self._tokenizer.bos_token_id
        if add_special_tokens and bos is not None and token_ids[:1] != [bos]:
            token_ids.insert(0, bos)
        return token_ids

    def token_strs(self, token_ids: list[int]) -> list[str]:
        """The text of each token; half a character shows as U+FFFD."""
        return [self._tokenizer.decode([token_id]) for token_id in token_ids]

    def detokenize(self, raw: RawRequest) -> str:
        """The text of ``input_ids``, special tokens included."""
        if raw.input_ids is None:
            raise RequestError(
                "Send input_ids to detokenize.", param="input_ids", code="missing_parameter"
            )
        if len(raw.input_ids) > MAX_PROMPT_BYTES:
            raise RequestError("input_ids holds too many token ids.", param="input_ids")
        return self._tokenizer.decode(self._check_input_ids(raw.input_ids, len(raw.input_ids)))

    def _chat(
        self, raw: RawRequest, use: ChatUse, is_limited: bool, salt: bytes | None = None
    ) -> tuple[list[int], str, Images]:
        if self._template is None:
            raise RequestError(
                "This model has no chat template. Send text_input instead of messages.",
                param="messages",
                code="unsupported",
            )
        parts: list[ImagePart] | None = None if self._images is None else []
        max_bytes = MAX_PROMPT_BYTES + (0 if parts is None else MAX_IMAGE_BYTES)
        messages = parse_messages(
            decode_json("messages", raw.messages, max_bytes), parts, self._template.part_roles
        )
        if is_limited:  # before rendering too: a template takes its time over megabytes
            self._check_size("".join(map(_words, messages)), "messages")
        decoded: list[DecodedImage] = []
        if self._images is not None and (parts or raw.images):
            decoded = self._images.decode_parts(parts or (), raw.images)
        tools = use.tool_use.tools if use.tool_use else ()
        rendered = self._template.render(messages, tools, use.options)
        if is_limited:
            self._check_size(rendered.text, "messages")
        if self._images is None or not decoded:
            if salt is None:
                return rendered.encode(self._tokenizer), rendered.text, ()
            form = f"chat {rendered.mark or ''}"  # which writes its own BOS
            token_ids = self._memo.encode(
                salt, form, rendered.marked, lambda: rendered.encode(self._tokenizer)
            )
            return token_ids, rendered.text, ()
        # Broken up by the mark, a placeholder in a client's own words is none.
        marked = self._images.expand(rendered.marked, decoded, "messages")
        token_ids = replace(rendered, marked=marked).encode(self._tokenizer)
        return token_ids, rendered.text, self._images.locate(token_ids, decoded, "messages")

    def _check_images(self, images: list[bytes], source: str) -> None:
        if self._images is None:
            raise RequestError(
                "image: this model takes text only. Leave it out.",
                param="image",
                code="unsupported",
            )
        if source == "input_ids" and images:
            raise RequestError(
                "image cannot go with input_ids. Send text_input or messages.", param="image"
            )

    def _check_size(self, text: str, param: str) -> None:
        """Refuse what cannot fit before the tokeniser spends time on all of it."""
        if self._tokenizer.surely_exceeds(text, self.max_model_len):
            what = f"The prompt of {len(text)} characters is longer: shorten it."
            raise context_exceeded(self.max_model_len, what, param)

    def _check_input_ids(self, token_ids: list[int], num_checked: int) -> list[int]:
        for idx, token_id in enumerate(token_ids[:num_checked]):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(
                    "input_ids must hold whole numbers.", param="input_ids", code="invalid_type"
                )
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"input_ids[{idx}] must be in [0, {self._vocab_size - 1}].", param="input_ids"
                )
        return list(token_ids)


def _words(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
