"""The images of the sequences in a worker: pixels until they are encoded, then embeddings."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from shoal.scheduler.images import PromptImage


class ImageEncoder(Protocol):
    """From the pixels of one image, uint8 [height, width, 3], to [num_tokens, hidden_size]."""

    def encode(self, pixels: np.ndarray) -> torch.Tensor: ...


@dataclass(slots=True)
class _Held:
    image: PromptImage | None  # None: encoded
    embeddings: torch.Tensor | None = None
    seq_ids: set[int] = field(default_factory=set)


class ImageStore:
    """Holds each image once, as long as a sequence with it lives. Owned by the engine's thread.

    Encoding waits until the tokens of an image are computed: a prefix in the cache needs none.
    """

    def __init__(self, encoder: ImageEncoder) -> None:
        self._encoder = encoder
        self._held: dict[bytes, _Held] = {}  # by the pixels' digest
        self._digests: dict[int, list[bytes]] = {}  # by seq_id
        self.num_encoded = 0

    @property
    def num_images(self) -> int:
        return len(self._held)

    def add(self, seq_id: int, images: Iterable[PromptImage]) -> None:
        """Keep these until the sequence is released."""
        for image in images:
            held = self._held.setdefault(image.span.digest, _Held(image))
            held.seq_ids.add(seq_id)
            self._digests.setdefault(seq_id, []).append(image.span.digest)

    def release(self, seq_id: int) -> None:
        """Drop what no other sequence has. Unknown ids are ignored."""
        for digest in self._digests.pop(seq_id, ()):
            held = self._held.get(digest)
            if held is None:  # twice in the same prompt
                continue
            held.seq_ids.discard(seq_id)
            if not held.seq_ids:
                del self._held[digest]

    def embeddings(self, digest: bytes, num_tokens: int) -> torch.Tensor:
        """[num_tokens, hidden_size] of an image that is held; encoded the first time.

        Raises ValueError where the encoder gives another number.
        """
        held = self._held[digest]
        if held.embeddings is None:
            assert held.image is not None
            image = held.image
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
            held.embeddings = self._encoder.encode(pixels)
            held.image = None
            self.num_encoded += 1
        if len(held.embeddings) != num_tokens:
            raise ValueError(
                f"an image has {len(held.embeddings)} embeddings for its {num_tokens} tokens"
            )
        return held.embeddings
