"""One safetensors file: its header checked against the file before anything is read.

Tensors are read, not mapped: a file that shrinks while it is read is an error then, and what was
read stays out of this process's memory.
"""

from pathlib import Path

import torch

from shoal.backend.weights.safetensors_header import SafetensorsHeader

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


class SafetensorsFile:
    """Raises ConfigError in one line, naming the file, and the tensor where it is one's fault."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = SafetensorsHeader(path)
        self.name = path.name
        self.tensors = self._header.tensors

    def read(self, name: str) -> torch.Tensor:
        """A tensor in the type in which it is stored."""
        entry = self.tensors[name]
        dtype = _DTYPES.get(entry.dtype_name)
        if dtype is None:
            raise self._header.fault(
                f"tensor {name} has type {entry.dtype_name}, which is not read here"
            )
        content = torch.empty(entry.num_bytes, dtype=torch.uint8)
        try:
            with self._path.open("rb") as file:
                file.seek(entry.begin)
                # A number of tensors are empty, and their memory has no address.
                count = file.readinto(content.numpy()) if entry.num_bytes else 0
        except OSError as error:
            raise self._header.fault(f"tensor {name} cannot be read: {error.strerror}") from error
        if count != entry.num_bytes:
            raise self._header.fault(f"tensor {name} is cut short; fetch the file again")
        return content.view(dtype).view(entry.shape)
