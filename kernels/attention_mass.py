"""How much attention each block gets: what says which blocks of a long sequence matter."""

import torch

MASS_ONE = 2**32  # a share of 1: whole numbers add up to the same in whatever order


def sum_block_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
    first_index: int,
    block_size: int,
    num_blocks: int,
) -> torch.Tensor:
    """Squared shares of attention, by block, summed over queries and heads: int64 [num_blocks].

    A block's share of a query's attention, in one head, is the sum of its keys' softmax weights.
    Squares let a few close looks count for more than many passing ones. The unit is 1 / MASS_ONE.

    ``query`` [num_heads, query_len, head_dim], ``key`` [num_kv_heads, key_len, head_dim], ``seen``
    bool [query_len, key_len]; ``first_index`` is the cache index of the first key.
    """
    mass = query.new_zeros(num_blocks, dtype=torch.int64)
    num_shared = query.shape[0] // key.shape[0]
    after = num_blocks * block_size - first_index - key.shape[1]
    for head, states in enumerate(query):  # one by one: the scores of all might not fit
        scores = states.float() @ key[head // num_shared].float().T * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        by_index = torch.nn.functional.pad(weights, (first_index, after))
        shares = by_index.unflatten(-1, (num_blocks, block_size)).sum(dim=-1).double()
        mass += (shares.square() * MASS_ONE).round().long().sum(dim=0)
    return mass
