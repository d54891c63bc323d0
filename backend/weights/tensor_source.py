"""What the loader needs of a checkpoint, whatever its format."""

from typing import Protocol

import torch


class TensorSource(Protocol):
    """Tensors of one checkpoint by their safetensors names, read one at a time."""

    def names(self) -> set[str]:
        """All tensors that a model could want."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in torch's order, from the header alone."""
        ...

    def num_bytes(self, name: str) -> int:
        """Bytes in the file, for progress."""
        ...

    def where(self, name: str) -> str:
        """The file's name and the tensor's own name there, for messages."""
        ...

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A copy in ``dtype`` on the CPU, dequantised if need be."""
        ...
