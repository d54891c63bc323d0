"""Images in prompts: which tokens stand for them, and what makes two of them the same."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens of a prompt that stand for one image."""

    start: int  # position of the first
    num_tokens: int
    digest: bytes  # SHA-256 of the decoded pixels and their shape
    is_whole: bool = False  # its tokens see each other both ways: one step computes up to its end

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def positions(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image on its way to the worker. ``pixels`` are uint8 [height, width, 3], RGB, as bytes."""

    span: ImageSpan
    height: int
    width: int
    pixels: bytes = field(repr=False)


def cache_keys(token_ids: list[int], images: Sequence[ImageSpan]) -> list[int]:
    """What a cache of prefixes compares: the token ids, but at an image's positions its digest.

    Four positions hold all of a digest, as negative numbers of 64 bits, which no token id is; so
    equal text with another image is another prefix from the image's first token on.
    """
    if not images:
        return token_ids
    keys = list(token_ids)
    for image in images:
        words = [-1 - (word >> 1) for word in array("Q", image.digest)]
        keys[image.start : image.stop] = [
            words[idx % len(words)] for idx in range(image.num_tokens)
        ]
    return keys


def image_cut_by(images: Iterable[ImageSpan], end: int) -> ImageSpan | None:
    """The image that a step ending before position ``end`` would cut though it must not."""
    for image in images:
        if image.is_whole and image.start < end < image.stop:
            return image
    return None
