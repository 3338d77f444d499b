"""Random numbers that every language of the runtime draws alike.

SplitMix64 (Steele, Lea and Flood 2014): one 64-bit counter, mixed. `runtime/native/src/sampling.cc`
is the same.
"""

import secrets

_MASK = 2**64 - 1


class SplitMix64:
    """A stream of random numbers.

    Args:
        seed: In [0, 2**64) for numbers that can be repeated; None for one that nobody can foresee.
    """

    def __init__(self, seed: int | None) -> None:
        self._state = secrets.randbits(64) if seed is None else seed

    def random(self) -> float:
        """Return a number in [0, 1), a multiple of 2**-53."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
        mixed ^= mixed >> 31
        return (mixed >> 11) * 2.0**-53
