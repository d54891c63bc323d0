"""Images as clients send them, into pixels: limits first, decoding after."""

import base64
import binascii
import hashlib
import io
import re
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from shoal.scheduler.errors import RequestError

MAX_BYTES = 8 * 2**20  # of an encoded image
MAX_PIXELS = 16 * 2**20  # of all images of a request together
MAX_SIDE = 16_384
MIN_SIDE = 8
MAX_IMAGES = 16  # of a request
FORMATS = ("PNG", "JPEG", "WEBP")

_LIMITS = f"at most {MAX_PIXELS} pixels in all images and {MAX_SIDE} a side"
_MAX_ENCODED = -(-MAX_BYTES // 3) * 4
_DATA_URI = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """``pixels`` uint8 [height, width, 3], RGB. The digest is of the pixels, whatever file they
    came in: equal pixels are one image to the prefix cache."""

    pixels: np.ndarray
    digest: bytes  # SHA-256


class ImageDecoder:
    """Decodes the images of one request, within limits for all of them together.

    Raises RequestError, naming the image; nothing is decoded before its sizes are known.
    """

    def __init__(self, num_images: int, param: str = "messages") -> None:
        if num_images > MAX_IMAGES:
            raise _refused(
                f"{param} may hold at most {MAX_IMAGES} images.", param, "too_many_images"
            )
        self._pixels_left = MAX_PIXELS

    def decode_url(self, url: str, param: str) -> DecodedImage:
        """One image from a base64 data URI."""
        return self._count(decode_image_url(url, param, self._pixels_left))

    def decode(self, data: bytes, param: str) -> DecodedImage:
        """One image from a file's bytes."""
        return self._count(decode_image(data, param, self._pixels_left))

    def check_encoded_length(self, length: int, param: str) -> None:
        """Refuse base64 that is too long before it is decoded."""
        if length > _MAX_ENCODED:
            raise _too_long(param)

    def _count(self, image: DecodedImage) -> DecodedImage:
        self._pixels_left -= image.pixels.shape[0] * image.pixels.shape[1]
        return image


def decode_image_url(url: str, param: str, max_pixels: int = MAX_PIXELS) -> DecodedImage:
    """One image from a base64 data URI. Raises RequestError; nothing is fetched, and nothing is
    decoded before its sizes are known to be within the limits."""
    head = _DATA_URI.match(url[:64])
    if head is None:
        raise _refused(
            f"{param} must be a data URI (data:image/png;base64,…); addresses are not fetched. "
            "Send the image itself.",
            param,
        )
    if len(url) - head.end() > _MAX_ENCODED:
        raise _too_long(param)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise _refused(f"{param} is not valid base64.", param) from None
    return decode_image(data, param, max_pixels)


def decode_image(data: bytes, param: str, max_pixels: int = MAX_PIXELS) -> DecodedImage:
    """One image from a file's bytes. Raises RequestError as ``decode_image_url`` does."""
    if len(data) > MAX_BYTES:
        raise _too_long(param)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own, softer limit of pixels
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image.size, param, max_pixels)
                upright = ImageOps.exif_transpose(image).convert("RGB")
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise _refused(f"{param} is too large: {_LIMITS}.", param, "image_too_large") from None
    except Exception:  # a damaged file can fail anywhere in a decoder
        raise _refused(
            f"{param} is no whole image of a kind that is read: {', '.join(FORMATS)}.", param
        ) from None
    pixels = np.asarray(upright)
    head = f"{pixels.shape[1]}x{pixels.shape[0]} RGB ".encode()
    return DecodedImage(pixels, hashlib.sha256(head + pixels.tobytes()).digest())


def _check_size(size: tuple[int, int], param: str, max_pixels: int) -> None:
    width, height = size
    if min(size) < MIN_SIDE:
        raise _refused(
            f"{param} is {width}x{height}: each side must have at least {MIN_SIDE} pixels.",
            param,
            "image_too_small",
        )
    if width * height > max_pixels or max(size) > MAX_SIDE:
        raise _refused(
            f"{param} is {width}x{height}: {_LIMITS}.",
            param,
            "image_too_large",
        )


def _too_long(param: str) -> RequestError:
    return _refused(f"{param} may take at most {MAX_BYTES} bytes.", param, "image_too_large")


def _refused(message: str, param: str, code: str = "invalid_image") -> RequestError:
    return RequestError(message, param=param, code=code)
