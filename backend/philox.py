"""Philox4x32-10, a counter-based random generator: no state, so nothing to save or replay.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (the Random123 library).
"""

NUM_RANDOM_BITS = 52

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # sqrt(3) - 1

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Four random 32-bit words for a 128-bit counter under a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = (product_1 >> 32) ^ c1 ^ k0
        c1 = product_1 & _MASK
        c2 = (product_0 >> 32) ^ c3 ^ k1
        c3 = product_0 & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def random_bits(seed: int, index: int) -> int:
    """NUM_RANDOM_BITS random bits for output position ``index`` of a sequence with ``seed``.

    Any 64-bit seed, signed or not. The upper two counter words stay zero: room for further
    independent draws at one position.
    """
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox4x32((index & _MASK, (index >> 32) & _MASK, 0, 0), key)
    return ((high << 32) | low) >> (64 - NUM_RANDOM_BITS)


def uniform(seed: int, index: int) -> float:
    """A float in the open interval (0, 1): never an end, also after rounding."""
    return (random_bits(seed, index) + 0.5) * 2.0**-NUM_RANDOM_BITS
