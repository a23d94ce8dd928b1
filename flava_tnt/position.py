"""The one idea: whatever is random is a pure function of (seed, position).

No process carries a generator along. A generator is made where it is needed, from the recipe's seed and the
place of the thing in the run: an epoch, a sample, a step, a parameter's name. So the same recipe gives the
same run on any number of ranks and workers, and a resume needs nothing but the step number.

The generator is NumPy's Philox, a counter-based one (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011): any key gives an independent stream.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def generator(seed: int, *position: int | str) -> np.random.Generator:
    """A generator for one place in the run.

    Args:
        seed: the recipe's seed.
        position: what the numbers are for, from general to particular, e.g. ``("crop", epoch, sample)``.
            The first part is a word that names the use, so that two uses never share a stream.
    """
    import numpy as np  # here, for listing plugins imports this module and should take a moment

    key = np.frombuffer(_digest(seed, *position), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _digest(seed: int, *position: int | str) -> bytes:
    """128 bits from the seed and the position; parts are told apart by type and by a separator."""
    parts = [f"s{part}" if isinstance(part, str) else f"i{int(part)}" for part in (seed, *position)]
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).digest()
