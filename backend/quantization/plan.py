"""Which tensors of a model are quantised, and how. Without torch."""

import math
from collections.abc import Mapping

INT4_BUDGET = 0.32  # of the bytes that the model takes in 16 bits
_GROUPS = {"int4": 128, "int4_fine": 64}  # input features that share a scale and a zero point
# Products by the ends of their names: w1, w2 and w3 are Mixtral's experts. A router is none.
_PRODUCTS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
_ENDS = ("lm_head.weight", "embed_tokens.weight")
# What is made finer than int4 while the budget allows, in this order: keys and values are few and
# cost most perplexity. Gate and up stay alike, as they are joined.
_FINER = (
    (_ENDS, "int8"),
    (("k_proj.weight", "v_proj.weight"), "int4_fine"),
    (("q_proj.weight", "o_proj.weight"), "int4_fine"),
    (("down_proj.weight", ".w2.weight"), "int4_fine"),
    (("gate_proj.weight", "up_proj.weight", ".w1.weight", ".w3.weight"), "int4_fine"),
)


def plan_formats(shapes: Mapping[str, tuple[int, ...]], quantization: str) -> dict[str, str]:
    """Formats by the names of the tensors that are quantised, all others staying as they are.

    Those are the matrices of products and the embedding; norms, biases and routers are not. With
    fp8 the embedding and the output projection are in int8, which is finer at the same size. With
    int4 the embedding and the output projection, which suffer most, keep 8 bits where the whole
    model then still takes at most 0.32 of its 16-bit size, else they get 4 too. What room is left
    then goes to groups of 64 ("int4_fine") where they help most.
    """
    if quantization == "none":
        return {}
    formats = {name: quantization for name, shape in shapes.items() if _is_quantised(name, shape)}
    if quantization == "fp8":
        return _changed(formats, _ENDS, "int8")
    for ends, kind in _FINER if quantization == "int4" else ():
        finer = _changed(formats, ends, kind)
        if memory_ratio(shapes, finer) <= INT4_BUDGET:
            formats = finer
    return formats


def _changed(formats: Mapping[str, str], ends: tuple[str, ...], kind: str) -> dict[str, str]:
    return {name: kind if name.endswith(ends) else old for name, old in formats.items()}


def memory_ratio(shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, str]) -> float:
    """Bytes of the model with ``formats`` to its bytes in 16 bits."""
    packed = sum(_num_bytes(shape, formats.get(name, "none")) for name, shape in shapes.items())
    return packed / sum(_num_bytes(shape, "none") for shape in shapes.values())


def _num_bytes(shape: tuple[int, ...], kind: str) -> int:
    """As in the native kernels: a group's scale takes two bytes there and four zero points two."""
    size = math.prod(shape)
    if kind == "none":
        return 2 * size
    rows, columns = shape
    if kind in _GROUPS:
        groups = -(-columns // _GROUPS[kind])
        return rows * (-(-columns // 2) + 2 * groups + 2 * -(-groups // 4))
    return size + 4 * rows


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.endswith(_PRODUCTS + _ENDS)
