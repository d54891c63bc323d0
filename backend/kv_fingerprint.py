"""What must be equal for stored keys and values to be of use."""

import os
from hashlib import sha256
from pathlib import Path

import torch

from shoal.backend.models.any_config import ServedConfig

FORMAT = b"2"
SAMPLE_BYTES = 2**20  # of each end of a weight file


def kv_fingerprint(
    weights: Path,
    model: ServedConfig,
    block_size: int,
    dtype: torch.dtype,
    keys_in_panels: bool,
    settings: str,
) -> bytes:
    """32 bytes that differ when the weights, the model, the layout of a block or ``settings`` do.

    Weight files count by name, size, time of change, and their first and last MiB: reading all of
    many gigabytes at each start would cost more than the cache saves. A changed file's time is new.
    """
    digest = sha256(FORMAT)
    block = f"{block_size} {dtype}{' panels' if keys_in_panels else ''}"
    for part in (repr(model), repr(model.kv_layout), block, settings):
        digest.update(sha256(part.encode()).digest())
    files = [weights] if weights.is_file() else sorted(p for p in weights.iterdir() if p.is_file())
    for path in files:
        status = path.stat()
        identity = f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}"
        digest.update(sha256(identity.encode()).digest())
        digest.update(_sample(path, status.st_size))
    return digest.digest()


def _sample(path: Path, size: int) -> bytes:
    digest = sha256()
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        if size > SAMPLE_BYTES:
            file.seek(-min(SAMPLE_BYTES, size - SAMPLE_BYTES), os.SEEK_END)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
