"""Weights that stay packed in memory, and the products that read them: the torch reference.

Each format is a weight [out_features, in_features] with its scales. It stands where a dense tensor
stands: ``kernels.linear`` and ``kernels.embedding`` take both. ``dtype`` is that of the states it
is multiplied with, and of what ``dequantize`` and ``rows`` return.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch.nn import functional


class QuantizedWeight(ABC):
    """What all formats offer. Tensors whose first dimension is out_features can be cut and joined
    by output feature."""

    values: torch.Tensor  # packed; the first dimension is out_features
    dtype: torch.dtype
    in_features: int

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """The dense weight in ``dtype``."""

    @abstractmethod
    def linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``states`` [..., in_features] to [..., out_features], of the same dtype."""

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.out_features, self.in_features))

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory: values, scales and what else belongs to the format."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device | str) -> Self:
        """The weight on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[type-var]

    def cut(self, first: int, last: int) -> Self:
        """The output features from ``first`` up to ``last``, without a copy."""
        shared = self.shared_fields()
        parts = {n: t[first:last] for n, t in self.tensors().items() if n not in shared}
        return replace(self, **parts)  # type: ignore[type-var]

    def take(self, index: torch.Tensor) -> Self:
        """The output features ``index`` int64 [n], in that order, still packed."""
        by_row = {
            name: tensor[index]
            for name, tensor in self.tensors().items()
            if name not in self.shared_fields()
        }
        return replace(self, **by_row)  # type: ignore[type-var]

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The same dense, in ``dtype``: an embedding."""
        return self.take(index.flatten()).dequantize().view(*index.shape, self.in_features)

    @classmethod
    def shared_fields(cls) -> tuple[str, ...]:
        """Tensors that all output features share."""
        return ()

    def joins(self, other: object) -> bool:
        """Whether ``other`` continues this weight: the same format, and what all rows share."""
        if type(self) is not type(other) or not isinstance(other, QuantizedWeight):
            return False
        mine, theirs = self.tensors(), other.tensors()
        return (
            mine.keys() == theirs.keys()
            and self.in_features == other.in_features
            and all(
                torch.equal(mine[name], theirs[name])
                for name in self.shared_fields()
                if name in mine
            )
            and all(
                mine[name].shape[1:] == theirs[name].shape[1:]
                and mine[name].dtype == theirs[name].dtype
                for name in mine
            )
        )


Weight = torch.Tensor | QuantizedWeight
# Features of a token's states that share a scale, where states are quantised.
STATE_GROUP = 64  # for weights of 4 bits, at most
INT8_STATE_GROUP = 32
TINY = 1e-30  # groups of states that reach no higher are zero in 8 bits
HUGE = 2.0**110  # those that reach this are not finite


def join(weights: Sequence[Weight]) -> Weight:
    """One weight with the output features of all: packed if they are of one format, else dense."""
    first = weights[0]
    if isinstance(first, QuantizedWeight) and all(first.joins(other) for other in weights[1:]):
        parts = [weight.tensors() for weight in weights if isinstance(weight, QuantizedWeight)]
        shared = first.shared_fields()
        joined = {
            name: torch.cat([part[name] for part in parts])
            for name in parts[0]
            if name not in shared
        }
        return replace(first, **joined)  # type: ignore[type-var]
    return torch.cat([dense(weight) for weight in weights])


def dense(weight: Weight) -> torch.Tensor:
    """The weight as a plain tensor."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


@dataclass(frozen=True, slots=True)
class Int8Weight(QuantizedWeight):
    """Signed bytes with one scale an output feature.

    The states are quantised as they come, each token's in groups of 32 features by their own
    largest magnitude, so that one outlier costs only its neighbours their precision. The sums of a
    group are whole numbers: exact, in whatever order.
    """

    values: torch.Tensor  # int8 [out_features, in_features]
    scales: torch.Tensor  # float32 [out_features]
    dtype: torch.dtype

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self.values.shape[1]

    def dequantize(self) -> torch.Tensor:
        return (self.values * self.scales[:, None]).to(self.dtype)

    def linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = states.reshape(-1, self.in_features)
        quantized, scales = quantize_tokens(rows, INT8_STATE_GROUP)
        out = torch.zeros(len(quantized), self.out_features, device=states.device)
        for group, scale in enumerate(scales.split(1, dim=1)):
            columns = slice(group * INT8_STATE_GROUP, (group + 1) * INT8_STATE_GROUP)
            sums = int8_product(quantized[:, columns], self.values[:, columns])
            out = out + sums * scale
        out = out * self.scales
        if bias is not None:
            out = out + bias.float()
        return out.to(states.dtype).view(*states.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class Int4Weight(QuantizedWeight):
    """Four bits a value, with a scale (and a zero point) for each group of input features.

    weight = (value - zero) * scale. On a CPU the states are quantised as they come, as with 8 bits,
    in groups that lie within one of the weight's.
    """

    values: torch.Tensor  # uint8 [out_features, ceil(in_features / 2)]: the even feature lies low
    scales: torch.Tensor  # float [out_features, num_groups]
    zeros: torch.Tensor | None  # uint8 [out_features, num_groups]; None: 8
    group_size: int  # the last group may be shorter
    in_features: int
    dtype: torch.dtype
    # int64 [in_features]: which feature each column holds, where groups are not neighbours.
    columns: torch.Tensor | None = None

    @classmethod
    def shared_fields(cls) -> tuple[str, ...]:
        return ("columns",)

    def dequantize(self) -> torch.Tensor:
        # A difference of 5 bits times a scale of 24 or less: rounded once, by the conversion.
        weight = (self._steps() * self._by_column(self.scales.float())).to(self.dtype)
        if self.columns is None:
            return weight
        out = torch.empty_like(weight)
        out[:, self.columns] = weight
        return out

    def linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if states.device.type != "cpu":
            return functional.linear(states, self.dequantize(), bias)
        rows = states.reshape(-1, self.in_features)
        if self.columns is not None:
            rows = rows[:, self.columns]
        quantized, scales = quantize_tokens(rows, self.state_group)
        steps = self._steps()
        out = torch.zeros(len(quantized), self.out_features)
        for group, scale in enumerate(scales.split(1, dim=1)):
            first = group * self.state_group
            columns = slice(first, first + self.state_group)
            sums = int8_product(quantized[:, columns], steps[:, columns])
            out = out + sums * scale * self.scales[:, first // self.group_size].float()
        if bias is not None:
            out = out + bias.float()
        return out.to(states.dtype).view(*states.shape[:-1], -1)

    @property
    def state_group(self) -> int:
        """Columns whose states share a scale."""
        if self.group_size >= self.in_features:
            return STATE_GROUP
        return math.gcd(STATE_GROUP, self.group_size)

    def _steps(self) -> torch.Tensor:
        """int16 [out_features, in_features]: the values less their zero points."""
        values = unpack_int4(self.values, self.in_features).to(torch.int16)
        return values - (8 if self.zeros is None else self._by_column(self.zeros).to(torch.int16))

    def _by_column(self, values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]


@dataclass(frozen=True, slots=True)
class Fp8Weight(QuantizedWeight):
    """Eight-bit floats (4 bits exponent, 3 bits mantissa) with one scale an output feature.

    The states are not quantised.
    """

    values: torch.Tensor  # float8_e4m3fn [out_features, in_features]
    scales: torch.Tensor  # float32 [out_features]
    dtype: torch.dtype

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self.values.shape[1]

    def dequantize(self) -> torch.Tensor:
        return (self.values.float() * self.scales[:, None]).to(self.dtype)

    def linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(states, self.dequantize(), bias)

    def take(self, index: torch.Tensor) -> "Fp8Weight":
        # torch gathers no float8.
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)
        return replace(self, values=values, scales=self.scales[index])


def quantize_tokens(
    states: torch.Tensor, group_size: int = STATE_GROUP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's groups of ``group_size`` by their own largest magnitudes: int8 like ``states``,
    and float32 scales [rows, groups]: the least powers of two of which 127 reach that magnitude.

    A group with a NaN, an infinity or a magnitude of 2^110 has scale NaN, which makes all its row's
    products NaN.
    """
    rows, columns = states.shape
    padded = functional.pad(states.float(), (0, -columns % group_size))
    groups = padded.view(rows, -1, group_size)
    highest = groups.abs().amax(-1)
    # 127 scales are 127 / 64 of the power of two that is a scale's 64-fold.
    bits = (highest.view(torch.int32) + 0x1FFFF) & 0x7F800000
    is_some = (highest > TINY) & (highest < HUGE)
    scales = torch.where(is_some, bits.view(torch.float32) / 64.0, 1.0)
    steps = torch.where(is_some[..., None], groups / scales[..., None], 0.0).round()
    scales = torch.where(highest < HUGE, scales, torch.nan)
    return steps.to(torch.int8).flatten(1)[:, :columns], scales


def int8_product(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 [m, k] times int8, or int16 within its range, [n, k] as float32 [m, n]: exact, k being
    at most a group of states."""
    assert states.shape[1] <= STATE_GROUP  # 64 * 128 * 127 is within the 24 bits of a float32
    return states.float() @ weight.float().t()


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k] of 0 to 15 to [n, ceil(k / 2)], the even column in the low bits."""
    padded = functional.pad(values, (0, values.shape[1] % 2))
    return padded[:, ::2] | (padded[:, 1::2] << 4)


def unpack_int4(packed: torch.Tensor, num_columns: int) -> torch.Tensor:
    """The reverse of ``pack_int4``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :num_columns]
