"""What keys and values the layers of a model keep, and which layers share block tables."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # a query at p sees keys in (p - window, p]; None: all up to p
    shared_with: int | None = None  # an earlier layer, whose keys and values this one reads

    @property
    def elements_per_token(self) -> int:
        """Keys and values together."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of equal window. Their blocks come and go together: one block table, one pool."""

    window: int | None
    layers: tuple[int, ...]  # those with a cache of their own


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Made by ``of`` or ``uniform``. Where there are layers without a window they are group 0.

    Group 0 holds all tokens of a sequence, whatever its window; the others only what their window
    still needs. In these, block 0 belongs to nobody: table entries of dropped blocks name it.
    """

    layers: tuple[LayerKV, ...]
    groups: tuple[KVGroup, ...]
    group_of: tuple[int, ...]  # by layer
    source_of: tuple[int, ...]  # by layer: the one whose cache it uses, itself or an earlier one

    @classmethod
    def of(cls, layers: Sequence[LayerKV]) -> "KVLayout":
        """The layout of layers in the model's order."""
        sources: list[int] = []
        for idx, layer in enumerate(layers):
            source = idx if layer.shared_with is None else sources[layer.shared_with]
            assert layers[source].elements_per_token == layer.elements_per_token
            assert layers[source].window == layer.window
            sources.append(source)
        windows = sorted({layer.window for layer in layers}, key=lambda w: (w is not None, w or 0))
        groups = tuple(
            KVGroup(
                window,
                tuple(
                    idx
                    for idx, layer in enumerate(layers)
                    if layer.window == window and sources[idx] == idx
                ),
            )
            for window in windows
        )
        group_of = tuple(windows.index(layer.window) for layer in layers)
        return cls(tuple(layers), groups, group_of, tuple(sources))

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int) -> "KVLayout":
        """Equal layers without a window: one group."""
        return cls.of([LayerKV(num_kv_heads, head_dim)] * num_layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of the groups after the first."""
        return tuple(group.window for group in self.groups[1:] if group.window is not None)

    def elements_per_token(self, group: int) -> int:
        """Elements that one token takes in all layers of a group."""
        return sum(self.layers[idx].elements_per_token for idx in self.groups[group].layers)

    def heads_per_token(self, group: int) -> int:
        """Keys and values of one token, counted by head, in all layers of a group."""
        return sum(2 * self.layers[idx].num_kv_heads for idx in self.groups[group].layers)
