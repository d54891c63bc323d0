"""How much attention each key gets: what says which blocks of a long sequence matter."""

import torch

MASS_ONE = 2**32  # a softmax weight of 1: whole numbers add up to the same in whatever order


def sum_attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax weights of one sequence, summed over queries and heads: int64 [key_len].

    ``query`` [num_heads, query_len, head_dim], ``key`` [num_kv_heads, key_len, head_dim], ``seen``
    bool [query_len, key_len]. The result's sum is num_heads * query_len, times
    ``MASS_ONE``.
    """
    mass = query.new_zeros(key.shape[1], dtype=torch.int64)
    num_shared = query.shape[0] // key.shape[0]
    for head, states in enumerate(query):  # one by one: the scores of all might not fit
        scores = states.float() @ key[head // num_shared].float().T * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        mass += (weights.double() * MASS_ONE).round().long().sum(dim=0)
    return mass
