"""Which tensors of a model are quantised, and how. Without torch."""

import math
from collections.abc import Mapping

INT4_BUDGET = 0.32  # of the bytes that the model takes in 16 bits
_BITS = {"none": 16.0, "int8": 8.0, "fp8": 8.0, "int4": 4.25}
# Products by the ends of their names: w1, w2 and w3 are Mixtral's experts. A router is none.
_PRODUCTS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
_ENDS = ("lm_head.weight", "embed_tokens.weight")


def plan_formats(shapes: Mapping[str, tuple[int, ...]], quantization: str) -> dict[str, str]:
    """Formats by the names of the tensors that are quantised, all others staying as they are.

    Those are the matrices of products and the embedding; norms, biases and routers are not. With
    fp8 the embedding and the output projection are in int8, which is finer at the same size. With
    int4 the embedding and the output projection, which suffer most, keep 8 bits where the whole
    model then still takes at most 0.32 of its 16-bit size, else they get 4 too.
    """
    if quantization == "none":
        return {}
    formats = {name: quantization for name, shape in shapes.items() if _is_quantised(name, shape)}
    if quantization in ("int4", "fp8"):
        with_wide_ends = {
            name: "int8" if name.endswith(_ENDS) else kind for name, kind in formats.items()
        }
        if quantization == "fp8" or memory_ratio(shapes, with_wide_ends) <= INT4_BUDGET:
            return with_wide_ends
    return formats


def memory_ratio(shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]) -> float:
    """Bytes of the model with ``formats`` to its bytes in 16 bits."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    bits = sum(size * _BITS[formats.get(name, "none")] for name, size in sizes.items())
    return bits / (16.0 * sum(sizes.values()))


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.endswith(_PRODUCTS + _ENDS)
