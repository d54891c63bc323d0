"""How long it takes to refuse images that are none: `python -m shoal.load.image_refusals`."""

import io
import statistics
import struct
import time
import zlib

from PIL import Image

from shoal.backend.images import decode_image
from shoal.scheduler.errors import RequestError

ROUNDS = 10


def png(width: int, height: int, data: bytes) -> bytes:
    """A PNG file that claims a size, whatever its data hold."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def saved(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def cases() -> dict[str, bytes]:
    """Files to refuse, by name."""
    noise = saved(Image.effect_noise((512, 512), 50).convert("RGB"))
    return {
        "bomb": png(60_000, 60_000, zlib.compress(bytes(10**7))),
        "truncated": noise[: len(noise) // 2],
        "1x1": saved(Image.new("RGB", (1, 1))),
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>' * 1000,
    }


def refusal_ms(data: bytes) -> float:
    """Milliseconds until the refusal; raises ValueError where there is none."""
    started = time.perf_counter()
    try:
        decode_image(data, "messages[0]")
    except RequestError:  # of status 400, as all that name a part of a request
        return (time.perf_counter() - started) * 1000
    raise ValueError("the image was taken")


def main() -> None:
    """Print the median and the worst time of each case."""
    for name, data in cases().items():
        times = [refusal_ms(data) for _ in range(ROUNDS)]
        print(f"{name}: 400, median {statistics.median(times):.2f} ms, worst {max(times):.2f} ms")


if __name__ == "__main__":
    main()
