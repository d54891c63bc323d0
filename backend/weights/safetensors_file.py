"""One safetensors file: its header checked against the file before anything is read.

The layout (https://github.com/huggingface/safetensors): eight bytes with the header's length, the
header in JSON, then the tensors' bytes. Tensors are read, not mapped: a file that shrinks while it
is read is an error then, and what was read stays out of this process's memory.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.backend.engine_config import ConfigError

MAX_HEADER_BYTES = 64 * 2**20
MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in its file, and what it is."""

    dtype_name: str
    shape: tuple[int, ...]
    begin: int  # from the start of the file, in bytes
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None for a type that is not known here."""
        return _DTYPES.get(self.dtype_name)


class SafetensorsFile:
    """Raises ConfigError in one line, naming the file, and the tensor where it is one's fault."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name
        self.tensors = self._read_header()

    def read(self, name: str) -> torch.Tensor:
        """A tensor in the type in which it is stored."""
        entry = self.tensors[name]
        if entry.dtype is None:
            raise self._fault(f"tensor {name} has type {entry.dtype_name}, which is not read here")
        content = torch.empty(entry.num_bytes, dtype=torch.uint8)
        try:
            with self._path.open("rb") as file:
                file.seek(entry.begin)
                # A number of tensors are empty, and their memory has no address.
                count = file.readinto(content.numpy()) if entry.num_bytes else 0
        except OSError as error:
            raise self._fault(f"tensor {name} cannot be read: {error.strerror}") from error
        if count != entry.num_bytes:
            raise self._fault(f"tensor {name} is cut short; fetch the file again")
        return content.view(entry.dtype).view(entry.shape)

    def _read_header(self) -> dict[str, TensorEntry]:
        try:
            file_bytes = self._path.stat().st_size
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                room = file_bytes - _LENGTH_BYTES
                if room < 2 or not 2 <= length <= min(MAX_HEADER_BYTES, room):
                    raise self._fault("is damaged or cut short; fetch it again")
                header = json.loads(file.read(length))
        except OSError as error:
            raise self._fault(f"cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise self._fault("is damaged: its header is not valid JSON; fetch it again") from error
        if not isinstance(header, dict):
            raise self._fault("is damaged: its header must hold a JSON object")
        header.pop("__metadata__", None)
        start = _LENGTH_BYTES + length
        tensors = {name: self._entry(name, value, start) for name, value in header.items()}
        self._check_layout(tensors, start, file_bytes)
        return tensors

    def _entry(self, name: str, value: Any, start: int) -> TensorEntry:
        """One tensor of the header, as it says itself."""
        value = value if isinstance(value, dict) else {}
        shape, offsets = value.get("shape"), value.get("data_offsets")
        if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            raise self._fault(f"tensor {name} has no proper shape")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._fault(f"tensor {name} has no proper place in the file")
        entry = TensorEntry(
            str(value.get("dtype"))[:16], tuple(shape), start + offsets[0], offsets[1] - offsets[0]
        )
        if entry.dtype is not None:
            needed = math.prod(shape) * entry.dtype.itemsize
            if needed != entry.num_bytes:
                raise self._fault(
                    f"tensor {name} has {entry.num_bytes} bytes, but its shape {list(shape)} in "
                    f"{entry.dtype_name} takes {needed}"
                )
        return entry

    def _check_layout(self, tensors: dict[str, TensorEntry], start: int, file_bytes: int) -> None:
        """Tensors must lie one after the other and fill the file."""
        end = start
        for name, entry in sorted(
            tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)
        ):
            if entry.begin != end:
                raise self._fault(f"tensor {name} overlaps another one or leaves a gap before it")
            end += entry.num_bytes
            if end > file_bytes:
                raise self._fault(
                    f"tensor {name} ends at byte {end}, but the file has {file_bytes}; "
                    "fetch it again"
                )
        if end != file_bytes:
            raise self._fault(f"has {file_bytes - end} bytes that belong to no tensor")

    def _fault(self, text: str) -> ConfigError:
        colon = ":" if text.startswith("tensor ") else ""
        return ConfigError(f"{self.name}{colon} {text}.")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
        for value in values
    )
