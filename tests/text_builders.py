"""Small tokenisers for tests that need no model."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from shoal.backend.text.tokenizer import Tokenizer, TokenizerSettings

BOS, EOS, TURN_END = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<s>' if loop.first }}[{{ message['role'] }}] {{ message['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_tokenizer(
    add_bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    special: tuple[str, ...] = (),
) -> Tokenizer:
    """One token a byte, with the byte as its id; then <s>, </s>, <end> and the further ``special``
    tokens."""
    fast = FastTokenizer(models.BPE(vocab=_byte_of_char(), merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<end>", *special)])
    return Tokenizer(
        fast,
        TokenizerSettings(
            bos_token_id=BOS,
            eos_token_ids=frozenset({EOS}),
            add_bos=add_bos,
            chat_template=chat_template,
            special_texts={"bos_token": "<s>", "eos_token": "</s>"},
        ),
    )


def _byte_of_char() -> dict[str, int]:
    """The library's alphabet: printable bytes as themselves, then the others in byte order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return dict(zip(alphabet, printable + others, strict=True))
