"""Make the random numbers that a draw needs, from (seed, choice, position) alone; PROCESS 2, every engine.

Counter-based: no state, so a number does not depend on what was drawn before, on which row or by which attempt. Pure
integer arithmetic in plain Python, some 10 µs a number; knows no logits and imports no torch.
"""

from __future__ import annotations

# Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 4.3;
# constants as in Random123 1.14, include/Random123/philox.h.
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words that Philox4x32-10 makes of a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _WORD, (product_0 >> 32) ^ c3 ^ k1, product_0 & _WORD
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, stream: int = 0) -> float:
    """Return a number in [0, 1) with 53 random bits, keyed by all 64 bits of `seed` and `position`.

    `choice` counts the completions of one request, `stream` the numbers of one draw (32 bits each). A negative seed
    counts as its two's complement.
    """
    counter = (position & _WORD, (position >> 32) & _WORD, choice & _WORD, stream & _WORD)
    first, second, _, _ = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    return ((first << 32 | second) >> 11) * 2.0**-53
