"""How far a result may be from the exact one. The only place where a tolerance is a number."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

# Relative to the largest element of the exact result. A sum of n terms in any order has a
# relative error of about sqrt(n) roundings of 2**-24 (float32) or 2**-53 (float64); the tests sum
# up to some hundred terms, through a few ops: 64 roundings. Two bodies may both be off by it.
TOLERANCE = {np.dtype(np.float32): 128 * 2.0**-24, np.dtype(np.float64): 128 * 2.0**-53}


def tolerance(dtype: DTypeLike) -> float:
    """The relative error that results in `dtype` may have."""
    return TOLERANCE[np.dtype(dtype)]
