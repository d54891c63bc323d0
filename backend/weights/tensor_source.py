"""What the loader needs of a checkpoint, whatever its format."""

from collections.abc import Container
from typing import Protocol

import torch

from shoal.kernels.quantized_weights import Weight


class TensorSource(Protocol):
    """Tensors of one checkpoint by their safetensors names, read one at a time."""

    def names(self) -> set[str]:
        """All tensors that a model could want."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in torch's order, from the header alone."""
        ...

    def packed_names(self) -> Container[str]:
        """Those that are packed in groups of columns: the shape may count a few too many."""
        ...

    def num_bytes(self, name: str) -> int:
        """Bytes in the file, for progress."""
        ...

    def where(self, name: str) -> str:
        """The file's name and the tensor's own name there, for messages."""
        ...

    def load(self, name: str, dtype: torch.dtype) -> Weight:
        """A copy on the CPU in ``dtype``, or packed for it where the file has it packed in a form
        that is kept."""
        ...
