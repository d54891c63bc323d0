"""Images of a request: from its parts and tensors to tokens of the prompt that stand for them."""

import base64
import binascii
import math
from collections.abc import Sequence

from shoal.backend.images import DecodedImage, ImageDecoder
from shoal.backend.messages import ImageForm
from shoal.backend.text.chat_messages import ImagePart
from shoal.backend.text.tokenizer import Tokenizer
from shoal.scheduler.errors import RequestError
from shoal.scheduler.images import ImageSpan, PromptImage

_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF")


class ImagePrompter:
    """Decodes the images of requests to one model, and writes their tokens into prompts.

    Stateless, thread-safe. Raises RequestError for what a client got wrong.
    """

    def __init__(self, form: ImageForm, tokenizer: Tokenizer) -> None:
        self._form = form
        self._placeholder = _token_text(tokenizer, form.placeholder_id)
        self._image, self._begin, self._end = (
            _token_text(tokenizer, token_id)
            for token_id in (form.image_token_id, form.begin_token_id, form.end_token_id)
        )

    def decode_parts(
        self, parts: Sequence[ImagePart], files: Sequence[bytes] | None
    ) -> list[DecodedImage]:
        """The images of messages in order; a part without an address takes the next file."""
        decoder = ImageDecoder(len(parts))
        rest = list(enumerate(files or ()))
        images = []
        for part in parts:
            if part.url is not None:
                images.append(decoder.decode_url(part.url, part.param))
                continue
            if not rest:
                raise RequestError(
                    f"{part.param} has no image: send it in the image tensor, or as image_url.",
                    param=part.param,
                )
            idx, data = rest.pop(0)
            images.append(_decode_file(decoder, data, f"image[{idx}]"))
        if rest:
            raise RequestError(
                f"image holds {len(rest)} more images than messages have parts of type 'image'.",
                param="image",
            )
        return images

    def decode_files(self, files: Sequence[bytes]) -> list[DecodedImage]:
        """The images of the ``image`` tensor."""
        decoder = ImageDecoder(len(files), "image")
        return [_decode_file(decoder, data, f"image[{idx}]") for idx, data in enumerate(files)]

    def place(self, text: str, num_images: int) -> str:
        """``text`` with a placeholder for each image: if it has none, they go in front."""
        return text if self._placeholder in text else self._placeholder * num_images + text

    def expand(self, text: str, images: Sequence[DecodedImage], param: str) -> str:
        """``text`` with each placeholder replaced by the tokens of its image."""
        pieces = text.split(self._placeholder)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                f"The prompt has {len(pieces) - 1} places for images ({self._placeholder}), but "
                f"there are {len(images)} images.",
                param=param,
            )
        expanded = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            tokens = self._begin + self._image * self._num_tokens(image) + self._end
            expanded += [self._form.margin, tokens, self._form.margin, piece]
        return "".join(expanded)

    def locate(
        self, token_ids: Sequence[int], images: Sequence[DecodedImage], param: str
    ) -> tuple[PromptImage, ...]:
        """Where in the prompt the tokens of the images are."""
        runs = _runs_of(token_ids, self._form.image_token_id)
        lengths = [self._num_tokens(image) for image in images]
        if [len(run) for run in runs] != lengths:
            raise RequestError(
                f"{self._image} stands for a part of an image: leave it out of the text.",
                param=param,
            )
        return tuple(
            PromptImage(
                ImageSpan(run.start, len(run), image.digest, self._form.both_ways),
                image.pixels.shape[0],
                image.pixels.shape[1],
                image.pixels.tobytes(),
            )
            for run, image in zip(runs, images, strict=True)
        )

    def _num_tokens(self, image: DecodedImage) -> int:
        return num_image_tokens(self._form, *image.pixels.shape[:2])


def num_image_tokens(form: ImageForm, height: int, width: int) -> int:
    """How many tokens stand for an image of this shape.

    With a patch size the image is scaled to fill ``max_tokens`` cells of ``pooling`` patches a
    side as well as whole cells can; a narrow one gets one row or column of cells.
    """
    if form.patch_size is None:
        return form.max_tokens
    cell = form.patch_size * form.pooling
    scale = math.sqrt(form.max_tokens * form.pooling**2 * form.patch_size**2 / (height * width))
    rows, columns = math.floor(scale * height / cell), math.floor(scale * width / cell)
    if rows == 0:
        return min(width // height, form.max_tokens)
    if columns == 0:
        return min(height // width, form.max_tokens)
    return rows * columns


def _decode_file(decoder: ImageDecoder, data: bytes, param: str) -> DecodedImage:
    """A file's bytes as they are, or in base64, or as a data URI."""
    if data.startswith(_MAGIC):
        return decoder.decode(data, param)
    if data[:5].lower() == b"data:":
        return decoder.decode_url(data.decode("latin-1"), param)
    decoder.check_encoded_length(len(data), param)
    try:
        return decoder.decode(base64.b64decode(data, validate=True), param)
    except (binascii.Error, ValueError):
        raise RequestError(
            f"{param} must hold a file's bytes or their base64.", param=param, code="invalid_image"
        ) from None


def _runs_of(token_ids: Sequence[int], wanted: int) -> list[range]:
    runs: list[range] = []
    for position, token_id in enumerate(token_ids):
        if token_id != wanted:
            continue
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode()
