"""What the prefix tree is made of, and what it tells of itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shoal.scheduler.eviction import NodeUsage


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A run of blocks with no branch inside; `token_ids` is block_size tokens for each block."""

    parent: "PrefixNode | None"
    token_ids: list[int]
    block_ids: list[int]
    usage: NodeUsage
    path_keys: list[int] = field(default_factory=list)  # one a block, if the policy keeps history
    children: dict[tuple[int, ...], "PrefixNode"] = field(default_factory=dict)
    exact: dict[bytes, int] = field(default_factory=dict)  # prompt digest -> its blocks in here
    num_locks: int = 0  # locks on this run or on one below
    stamp: int = 0  # number of the one valid heap entry; 0: none
    salt: bytes = b""  # of roots only


@dataclass(slots=True, frozen=True, eq=False)
class PrefixMatch:
    """The longest cached prefix of a prompt. Good until the tree changes: lock it at once."""

    block_ids: list[int]
    num_tokens: int
    node: PrefixNode
    num_node_blocks: int  # how many of the node's blocks belong to the match
    version: int


@dataclass(slots=True, eq=False)
class PrefixLock:
    """Keeps a path from eviction until it is given to `unlock`, once."""

    node: PrefixNode
    released: bool = False


@dataclass(slots=True, frozen=True, eq=False)
class InsertResult:
    """`duplicate_block_ids` were not taken over: the caller frees them. `match` covers it all."""

    duplicate_block_ids: list[int]
    match: PrefixMatch


@dataclass(slots=True, frozen=True, eq=False)
class EvictedRun:
    """Blocks about to leave, first to last on their path, for a tier that may keep their KV.

    `path_digests` are `path_digests(salt, prefix + token_ids, block_size)` of just these blocks.
    """

    salt: bytes
    num_prefix_tokens: int
    token_ids: list[int]
    block_ids: list[int]
    path_digests: list[bytes]


DemoteHook = Callable[[EvictedRun], None]


def ancestors(node: PrefixNode) -> Iterator[PrefixNode]:
    """The runs above it, nearest first, up to its root."""
    while node.parent is not None:
        node = node.parent
        yield node
