"""Images from clients: what is read, and what is refused before it costs anything."""

import base64
import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from shoal.backend import images
from shoal.backend.images import ImageDecoder, decode_image, decode_image_url
from shoal.scheduler.errors import RequestError


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def data_uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def noise(height: int = 20, width: int = 30, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes that says it is large, with data that would go on."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(2**20), 9)
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_pixels_of_lossless_files_are_kept() -> None:
    pixels = noise()
    image = decode_image_url(data_uri(encoded(pixels)), "image")
    assert np.array_equal(image.pixels, pixels)
    lossless = io.BytesIO()
    Image.fromarray(pixels).save(lossless, "WEBP", lossless=True)
    again = decode_image(lossless.getvalue(), "image")
    assert again.digest == image.digest  # the file is another, the pixels are the same
    assert decode_image(encoded(pixels, "JPEG"), "image").digest != image.digest


def test_digest_knows_the_shape() -> None:
    pixels = noise(20, 30)
    turned = decode_image(encoded(pixels.reshape(30, 20, 3)), "image")
    assert turned.digest != decode_image(encoded(pixels), "image").digest


def test_other_colours_become_rgb() -> None:
    for mode in ("L", "RGBA", "P", "1", "CMYK"):
        file = io.BytesIO()
        Image.fromarray(noise()).convert(mode).save(file, "JPEG" if mode == "CMYK" else "PNG")
        assert decode_image(file.getvalue(), "image").pixels.shape == (20, 30, 3)


def test_a_photo_is_turned_upright() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.fromarray(noise(20, 30)).save(file, "JPEG", exif=exif)
    assert decode_image(file.getvalue(), "image").pixels.shape == (30, 20, 3)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"></svg>'


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (bomb(50_000, 50_000), "image_too_large"),
        (bomb(2**31 - 1, 2**31 - 1), "image_too_large"),
        (bomb(16_385, 8), "image_too_large"),
        (encoded(noise(200, 200))[:5000], "invalid_image"),
        (bomb(2048, 2048), "invalid_image"),  # fewer pixels than it says
        (encoded(noise(1, 1)), "image_too_small"),
        (encoded(noise(300, 7)), "image_too_small"),
        (SVG, "invalid_image"),
        (b"", "invalid_image"),
        (b"\x89PNG\r\n\x1a\n", "invalid_image"),
        (encoded(noise(), "BMP"), "invalid_image"),
        (encoded(noise(), "TIFF"), "invalid_image"),
    ],
)
def test_refusals(data: bytes, code: str) -> None:
    tracemalloc.start()
    with pytest.raises(RequestError) as caught:
        decode_image_url(data_uri(data), "messages[0].content[1].image_url")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 2**20 + 8 * len(data)  # nothing of the size that it claims
    assert caught.value.code == code
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[1].image_url"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "data:text/html;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,AAA",
    ],
)
def test_only_base64_data_uris_are_read(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_image_url(url, "image_url")
    assert caught.value.code == "invalid_image"


def test_size_is_checked_before_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr(images.base64, "b64decode", never)
    with pytest.raises(RequestError, match="at most 8388608 bytes"):
        decode_image_url("data:image/png;base64," + "A" * (12 * 2**20), "image_url")


def test_number_of_images_is_limited() -> None:
    with pytest.raises(RequestError, match="at most 16 images"):
        ImageDecoder(17)


def test_pixels_of_all_images_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    decoder = ImageDecoder(2)
    decoder.decode(encoded(noise(20, 30)), "first")
    with pytest.raises(RequestError) as caught:
        decoder.decode(encoded(noise(20, 30)), "second")
    assert caught.value.param == "second"
    assert caught.value.code == "image_too_large"
