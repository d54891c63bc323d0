"""Digests of prompts and of their block paths: names that one salt cannot guess of another."""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def path_digests(salt: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Salted SHA-256 of the path up to the end of each full block, chained block by block."""
    digest = sha256(salt).digest()
    digests = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = array("q", token_ids[end - block_size : end]).tobytes()
        digest = sha256(digest + block).digest()
        digests.append(digest)
    return digests


def prompt_digest(salt: bytes, token_ids: Sequence[int]) -> bytes:
    """Salted SHA-256 of a whole prompt."""
    return sha256(sha256(salt).digest() + array("q", token_ids).tobytes()).digest()
