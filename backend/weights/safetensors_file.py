"""One safetensors file: its header checked against the file before anything is read.

Tensors are read, not mapped: a file that shrinks while it is read is an error then, and what was
read stays out of this process's memory.
"""

from pathlib import Path

import torch

from shoal.backend.weights.safetensors_header import SafetensorsHeader

_SLICE = 2**18  # elements that are converted at a time
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

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in ``dtype``, or in the type in which it is stored."""
        entry = self.tensors[name]
        stored = _DTYPES.get(entry.dtype_name)
        if stored is None:
            raise self._header.fault(
                f"tensor {name} has type {entry.dtype_name}, which is not read here"
            )
        num_elements = entry.num_bytes // stored.itemsize
        out = torch.empty(num_elements, dtype=dtype or stored)
        converts = out.dtype != stored
        step = _SLICE if converts else max(1, num_elements)
        try:
            with self._path.open("rb") as file:
                file.seek(entry.begin)
                for part in out.split(step) if num_elements else ():
                    content = torch.empty(len(part), dtype=stored) if converts else part
                    count = file.readinto(content.view(torch.uint8).numpy())
                    if count != content.nbytes:
                        raise self._header.fault(
                            f"tensor {name} is cut short; fetch the file again"
                        )
                    if converts:
                        part.copy_(content)
        except OSError as error:
            raise self._header.fault(f"tensor {name} cannot be read: {error.strerror}") from error
        return out.view(entry.shape)
