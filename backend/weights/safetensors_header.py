"""The header of one safetensors file, checked against the file, without torch.

The layout (https://github.com/huggingface/safetensors): eight bytes with the header's length, the
header in JSON, then the tensors' bytes.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.backend.engine_config import ConfigError

MAX_HEADER_BYTES = 64 * 2**20
MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8
# Bytes an element, of the types that are read.
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in its file, and what it is."""

    dtype_name: str
    shape: tuple[int, ...]
    begin: int  # from the start of the file, in bytes
    num_bytes: int


class SafetensorsHeader:
    """Raises ConfigError in one line, naming the file, and the tensor where it is one's fault."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name
        self.tensors = self._read_header()

    def _read_header(self) -> dict[str, TensorEntry]:
        try:
            file_bytes = self._path.stat().st_size
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                room = file_bytes - _LENGTH_BYTES
                if room < 2 or not 2 <= length <= min(MAX_HEADER_BYTES, room):
                    raise self.fault("is damaged or cut short; fetch it again")
                header = json.loads(file.read(length))
        except ConfigError:  # which is a ValueError
            raise
        except OSError as error:
            raise self.fault(f"cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise self.fault("is damaged: its header is not valid JSON; fetch it again") from error
        if not isinstance(header, dict):
            raise self.fault("is damaged: its header must hold a JSON object")
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
            raise self.fault(f"tensor {name} has no proper shape")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self.fault(f"tensor {name} has no proper place in the file")
        entry = TensorEntry(
            str(value.get("dtype"))[:16], tuple(shape), start + offsets[0], offsets[1] - offsets[0]
        )
        if entry.dtype_name in ITEM_BYTES:
            needed = math.prod(shape) * ITEM_BYTES[entry.dtype_name]
            if needed != entry.num_bytes:
                raise self.fault(
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
                raise self.fault(f"tensor {name} overlaps another one or leaves a gap before it")
            end += entry.num_bytes
            if end > file_bytes:
                raise self.fault(
                    f"tensor {name} ends at byte {end}, but the file has {file_bytes}; "
                    "fetch it again"
                )
        if end != file_bytes:
            raise self.fault(f"has {file_bytes - end} bytes that belong to no tensor")

    def fault(self, text: str) -> ConfigError:
        """An error of this file, by name."""
        colon = ":" if text.startswith("tensor ") else ""
        return ConfigError(f"{self.name}{colon} {text}.")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
        for value in values
    )
