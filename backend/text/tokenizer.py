"""The tokeniser of one checkpoint: GGUF metadata or a folder with tokenizer.json."""

import json
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from shoal.backend.engine_config import ConfigError
from shoal.backend.text.gguf_metadata import read_gguf_metadata
from shoal.backend.text.gguf_tokenizer import build_fast_tokenizer

# One text at a time has nothing to share out, and idle threads make a later fork unsafe.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_UNBOUNDED = 2**62
_CHARS_PER_TOKEN = 4  # a text of at most so many characters for each token is encoded at once


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What a checkpoint says about its tokeniser beside the vocabulary and merges.

    ``special_texts`` maps template variables (``bos_token``, ``eos_token``, …) to token texts.
    """

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    chat_template: str | None = None
    special_texts: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to token ids and back. Immutable after construction; any thread may use it.

    Text is encoded off the GIL. ``allow_special=False`` makes text that spells a special token
    ordinary text: a client cannot forge the end of a turn.
    """

    def __init__(self, fast: FastTokenizer, settings: TokenizerSettings) -> None:
        text = fast.to_str()
        spec = json.loads(text)
        self.settings = settings
        self._fast = fast
        # encode_special_tokens is a state of the object, so there is one object for each state.
        self._literal = FastTokenizer.from_str(text)
        self._literal.encode_special_tokens = True
        self._added = {item["content"]: item for item in spec["added_tokens"]}
        self._special_ids = frozenset(
            item["id"] for item in spec["added_tokens"] if item["special"]
        )
        self._is_byte_level = _is_byte_level(spec.get("decoder"))
        self._has_normalizer = spec.get("normalizer") is not None
        self._bytes: dict[int, bytes] = {}  # filled as tokens are met; a race costs a repeat only

    @classmethod
    def from_checkpoint(cls, path: Path) -> "Tokenizer":
        """Load from a GGUF file or a folder. Raises ConfigError, naming what is missing or odd."""
        if path.is_dir():
            return cls(_load_fast(path / "tokenizer.json"), _folder_settings(path))
        metadata = read_gguf_metadata(path)
        return cls(build_fast_tokenizer(metadata), _gguf_settings(metadata))

    def to_json(self) -> str:
        """The tokeniser as a tokenizer.json."""
        return str(self._fast.to_str())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id. The model's own vocabulary may be padded beyond."""
        return max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self.settings.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.settings.eos_token_ids

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text and id of each special token."""
        return {text: item["id"] for text, item in self._added.items() if item["special"]}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any special token's text, the longest first."""
        texts = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def encode(self, text: str, *, allow_special: bool = True, add_bos: bool = False) -> list[int]:
        """Return the token ids of ``text``.

        ``add_bos`` puts one BOS in front if the model wants one and the text has none itself.
        """
        fast = self._fast if allow_special else self._literal
        # The batch form leaves the GIL alone meanwhile, and computes no offsets.
        token_ids: list[int] = fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        bos = self.settings.bos_token_id
        if add_bos and self.settings.add_bos and bos is not None and token_ids[:1] != [bos]:
            token_ids.insert(0, bos)
        return token_ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Encode ``text``, in which ``mark`` breaks up what must not count as a special token.

        Otherwise equal to ``encode`` of the text without the marks.
        """
        token_ids: list[int] = []
        start, strips_next = 0, False
        for match in [*self.special_pattern.finditer(text), None]:
            ordinary = text[start : match.start() if match else None].replace(mark, "")
            item = self._added[match.group()] if match else None
            ordinary = ordinary.lstrip() if strips_next else ordinary
            ordinary = ordinary.rstrip() if item and item["lstrip"] else ordinary
            if ordinary:
                token_ids += self.encode(ordinary, allow_special=False)
            if match and item:
                token_ids.append(item["id"])
                start, strips_next = match.end(), item["rstrip"]
        return token_ids

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        """Return the text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        pieces = (
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special and token_id in self._special_ids)
        )
        return b"".join(pieces).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure and has no text of its own."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an id that only pads the model's vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        if token in self._added:
            return token.encode()
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(match.group(1))
        return token.replace("\u2581", " ").encode()

    def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether ``text`` has more than ``num_tokens`` tokens, by a look at a part of it.

        Takes time by ``num_tokens``, not by the text: the byte length may be proof enough; else
        growing beginnings are encoded. A cut can change the tokens of its last word, so a beginning
        must exceed by a margin. False says nothing.
        """
        if len(text) <= _CHARS_PER_TOKEN * num_tokens:
            return False
        if len(text.encode()) > self._max_token_bytes * num_tokens:
            return True
        margin = num_tokens + num_tokens // 4 + 64
        num_chars = 2 * num_tokens
        while num_chars < len(text):
            if len(self.encode(text[:num_chars])) > margin:
                return True
            num_chars *= 2
        return False

    @cached_property
    def _max_token_bytes(self) -> int:
        # A normaliser, or a special token that swallows whitespace, can shorten text at will.
        swallows = any(item["lstrip"] or item["rstrip"] for item in self._added.values())
        if self._has_normalizer or swallows or not self._is_byte_level:
            return _UNBOUNDED
        longest = max(map(len, self._fast.get_vocab(with_added_tokens=False)))
        return max([longest, *(len(text.encode()) for text in self._added)])


def _byte_level_bytes(token: str) -> bytes:
    """As the library's ByteLevel decoder: a token with any foreign character stands for itself."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, others for U+0100 and onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        raise ConfigError("tokenizer.json has no decoder; byte-level and byte-fallback work.")
    kinds = {item["type"] for item in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return True
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return False
    raise ConfigError(
        f"tokenizer.json has a decoder of type {decoder['type']!r}, which is not supported; "
        "ByteLevel, ByteFallback and Metaspace are."
    )


def _load_fast(path: Path) -> FastTokenizer:
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing from the checkpoint folder.")
    try:
        return FastTokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path.name} cannot be used: {error}.") from error


def _gguf_settings(metadata: dict[str, Any]) -> TokenizerSettings:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {
        name: metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
            ("eot_token", "eot"),
        )
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    for name, token_id in ids.items():
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ConfigError(f"The GGUF file's {name} id {token_id!r} is outside its vocabulary.")
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSettings(
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=frozenset(ids[name] for name in ("eos_token", "eot_token") if name in ids),
        # A SentencePiece vocabulary that does not say otherwise wants one.
        add_bos=bool(
            metadata.get(
                "tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama"
            )
        ),
        chat_template=template if isinstance(template, str) else None,
        special_texts={name: tokens[token_id] for name, token_id in ids.items()},
    )


def _folder_settings(folder: Path) -> TokenizerSettings:
    config = _read_json(folder / "tokenizer_config.json")
    fast = _load_fast(folder / "tokenizer.json")
    texts = {
        name: _token_text(config[name])
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if config.get(name) is not None
    }
    bos = fast.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    return TokenizerSettings(
        bos_token_id=bos,
        eos_token_ids=_folder_eos_ids(folder, fast, texts),
        add_bos=_wants_bos(config, fast, bos),
        chat_template=_folder_template(folder, config),
        special_texts=texts,
    )


def _wants_bos(config: dict[str, Any], fast: FastTokenizer, bos: int | None) -> bool:
    """What tokenizer_config.json says, else what the tokeniser's own post-processor does."""
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    return bos is not None and fast.encode("a", add_special_tokens=True).ids[:1] == [bos]


def _folder_eos_ids(folder: Path, fast: FastTokenizer, texts: dict[str, str]) -> frozenset[int]:
    ids = {fast.token_to_id(texts["eos_token"])} if "eos_token" in texts else set()
    for name in ("config.json", "generation_config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [value])
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = next((item["template"] for item in template if item["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    """The file's mapping; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name} is not valid JSON.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} must hold a JSON object.")
    return data
