"""From a request with images to token ids, as transformers' processor gives them."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from text_builders import BOS, make_tokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from shoal.backend.image_prompt import ImagePrompter, num_image_tokens
from shoal.backend.intake import Intake, PreparedRequest, RawRequest
from shoal.backend.messages import ImageForm
from shoal.backend.text.chat_template import ChatTemplate
from shoal.scheduler.errors import RequestError

TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}[{{ message['role'] }}] "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end>{% endfor %}"
)
IMAGE, BEGIN, END = 259, 260, 261
FORM = ImageForm(
    placeholder_id=IMAGE,
    image_token_id=IMAGE,
    begin_token_id=BEGIN,
    end_token_id=END,
    max_tokens=70,
    both_ways=True,
    patch_size=4,
    pooling=3,
)


def make_intake(form: ImageForm | None = FORM, **options: Any) -> Intake:
    tokenizer = make_tokenizer(
        add_bos=True, chat_template=TEMPLATE, special=("<image>", "<begin>", "<stop>")
    )
    images = ImagePrompter(form, tokenizer) if form is not None else None
    return Intake(tokenizer, ChatTemplate(TEMPLATE, tokenizer), 800, 400, images=images, **options)


INTAKE = make_intake()


def picture(height: int = 20, width: int = 30, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def as_png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def url_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def chat(*parts: dict[str, Any], intake: Intake = INTAKE, **tensors: Any) -> PreparedRequest:
    messages = json.dumps([{"role": "user", "content": list(parts)}])
    return intake.prepare(RawRequest(messages=messages, **tensors))


def refused(*parts: dict[str, Any], **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(*parts, **options)
    assert caught.value.status == 400
    return caught.value


def tokens_of(pixels: np.ndarray) -> list[int]:
    count = num_image_tokens(FORM, *pixels.shape[:2])
    return [BEGIN, *[IMAGE] * count, END]


def test_images_between_texts() -> None:
    first, second = picture(), picture(50, 20)
    request = chat(
        text_part("a"), url_part(as_png(first)), text_part("b"), url_part(as_png(second))
    )
    expected = [BOS, *b"[user] a", *tokens_of(first), *b"b", *tokens_of(second), 258]
    assert request.prompt_token_ids == expected
    spans = [image.span for image in request.images]
    assert [span.start for span in spans] == [10, 13 + spans[0].num_tokens]
    assert all(span.is_whole for span in spans)
    assert request.images[0].pixels == first.tobytes()
    assert (request.images[1].height, request.images[1].width) == (50, 20)


@pytest.mark.parametrize("max_tokens", [70, 280, 1120])
def test_numbers_of_tokens_are_those_of_the_processor(max_tokens: int) -> None:
    processor = Gemma4ImageProcessorPil(
        patch_size=2, max_soft_tokens=max_tokens, pooling_kernel_size=3, do_normalize=False
    )
    form = ImageForm(IMAGE, IMAGE, BEGIN, END, max_tokens, patch_size=2, pooling=3)
    generator = np.random.default_rng(1)
    shapes = [(8, 16000), (9000, 8), (8, 8), *generator.integers(8, 700, (25, 2)).tolist()]
    for height, width in shapes:
        image = np.zeros((height, width, 3), dtype=np.uint8)
        inputs = processor(images=[image], input_data_format="channels_last")
        expected = int(inputs["num_soft_tokens_per_image"][0])
        assert num_image_tokens(form, height, width) == expected, (height, width)


def test_files_beside_the_text() -> None:
    first, second = picture(), picture(seed=1)
    files = [as_png(first), base64.b64encode(as_png(second))]
    request = INTAKE.prepare(RawRequest(text_input="a<image>b<image>", images=files))
    assert request.prompt_token_ids == [BOS, *b"a", *tokens_of(first), *b"b", *tokens_of(second)]
    assert request.prompt_text == "a<image>b<image>"
    in_front = INTAKE.prepare(RawRequest(text_input="ab", images=files))
    assert in_front.prompt_token_ids == [BOS, *tokens_of(first), *tokens_of(second), *b"ab"]
    parts = chat({"type": "image"}, text_part("x"), images=files[:1])
    assert parts.prompt_token_ids == [BOS, *b"[user] ", *tokens_of(first), *b"x", 258]


def test_a_clients_words_are_no_placeholder() -> None:
    pixels = picture()
    request = chat(text_part("<image>"), url_part(as_png(pixels)))
    assert request.prompt_token_ids == [BOS, *b"[user] <image>", *tokens_of(pixels), 258]


def bomb() -> bytes:
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(2**22), 9)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"></svg>'


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (url_part(bomb()), "image_too_large"),
        (url_part(as_png(picture(200, 200))[:30_000]), "invalid_image"),
        (url_part(as_png(picture(1, 1))), "image_too_small"),
        (url_part(SVG, "svg+xml"), "invalid_image"),
    ],
    ids=["bomb", "truncated", "1x1", "svg"],
)
def test_bad_images(part: dict[str, Any], code: str) -> None:
    error = refused(text_part("see"), part)
    assert error.code == code
    assert error.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url"),
        ({"type": "image_url", "image_url": "x"}, "image_url"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "image"}, ""),
        ({"type": "input_audio"}, "type"),
        (
            {"type": "image_url", "image_url": {"url": "data:", "detail": "high"}},
            "image_url.detail",
        ),
    ],
)
def test_parts_that_hold_no_image(part: dict[str, Any], param: str) -> None:
    error = refused(part)
    assert error.param == ("messages[0].content[0]." + param).rstrip(".")


def test_text_models_name_the_part() -> None:
    intake = make_intake(None)
    error = refused(text_part("a"), url_part(as_png(picture())), intake=intake)
    assert error.param == "messages[0].content[1].type"
    with pytest.raises(RequestError, match="text only") as caught:
        intake.prepare(RawRequest(text_input="a", images=[as_png(picture())]))
    assert caught.value.param == "image"


def test_only_users_send_images() -> None:
    messages = json.dumps([{"role": "system", "content": [url_part(as_png(picture()))]}])
    with pytest.raises(RequestError) as caught:
        INTAKE.prepare(RawRequest(messages=messages))
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("tensors", "param"),
    [
        ({"text_input": "<image>", "images": [as_png(picture())] * 2}, "text_input"),
        ({"input_ids": [1, 2], "images": [as_png(picture())]}, "image"),
        ({"text_input": "a", "images": [b"!"]}, "image[0]"),
        ({"text_input": "a", "images": [as_png(picture())] * 17}, "image"),
        ({"text_input": "a", "images": [as_png(picture())] * 16}, "text_input"),  # the context
    ],
)
def test_refused_files(tensors: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        INTAKE.prepare(RawRequest(**tensors))
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["prompt_logprobs", "n"])
def test_what_does_not_go_with_images(name: str) -> None:
    values = {"prompt_logprobs": {"prompt_logprobs": 1}, "n": {"n": 32}}[name]
    pixels = picture(1500, 1500) if name == "n" else picture()
    error = refused(url_part(as_png(pixels)), sampling_parameters=json.dumps(values))
    assert error.param == name
