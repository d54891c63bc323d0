"""What others' rounding to 4 bits costs: perplexity by transformers, of weights rounded by
compressed-tensors or in llama.cpp's format. What our int4 is compared with."""

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

GROUP = 128


def nearest_int4(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest by compressed-tensors: asymmetric, groups of 128, the last one shorter."""
    quantization = import_module("compressed_tensors.quantization")
    forward = import_module("compressed_tensors.quantization.lifecycle.forward")
    parameters = import_module("compressed_tensors.quantization.utils")
    padded = functional.pad(weight, (0, -weight.shape[1] % GROUP))
    groups = padded.view(len(weight), -1, GROUP)
    args = quantization.QuantizationArgs(
        num_bits=4, strategy="group", group_size=GROUP, symmetric=False
    )
    scales, zeros = parameters.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    rounded: torch.Tensor = forward.fake_quantize(padded, scales, zeros, args)
    return rounded[:, : weight.shape[1]]


def q4_0(weight: torch.Tensor) -> torch.Tensor:
    """llama.cpp's Q4_0 as the ``gguf`` library writes it: symmetric, groups of 32."""
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType.Q4_0
    packed = quants.quantize(weight.float().numpy(), kind)
    return torch.from_numpy(quants.dequantize(packed, kind)).to(weight.dtype)


REFERENCES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "nearest": ("transformers, int4 rounded to nearest, groups of 128", nearest_int4),
    "q4_0": ("transformers, llama.cpp's Q4_0, groups of 32", q4_0),
}


def reference_perplexities(
    weights: Path, windows: list[list[int]], names: list[str]
) -> dict[str, float]:
    """By the names of REFERENCES. Products' weights are rounded; the embedding stays as it is.

    In float32; exp of the mean negative log likelihood of all tokens but each window's first.
    """
    from transformers import AutoModelForCausalLM

    where = {"gguf_file": weights.name} if weights.is_file() else {}
    folder = weights.parent if weights.is_file() else weights
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    model.eval()
    products = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.endswith("_proj.weight")
    }
    before = {name: parameter.data for name, parameter in products.items()}
    found = {}
    with torch.inference_mode():
        for name in names:
            for key, parameter in products.items():
                parameter.data = REFERENCES[name][1](before[key])
            found[name] = _perplexity(model, windows)
            print(f"{REFERENCES[name][0]}: {found[name]:.3f}", flush=True)
    return found


def _perplexity(model: torch.nn.Module, windows: list[list[int]]) -> float:
    total, count = 0.0, 0
    for window in windows:
        tokens = torch.tensor([window])
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        total += float(functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)
