"""bfloat16 as the bits that it is: numpy has no such type, so 16-bit words stand for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_QUIET = np.uint32(0x0040)
_SHIFT = np.uint32(16)
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)


def widen(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 values of bfloat16 words, exactly; an array of its own.

    Parameters
    ----------
    bits
        Array of uint16 words.
    """
    wide = bits.astype(np.uint32)
    np.left_shift(wide, _SHIFT, out=wide)
    return wide.view(np.float32)


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """bfloat16 words of float32 values, rounded to nearest, ties to even; NaN stays NaN.

    Parameters
    ----------
    values
        Contiguous array of float32; left as it is.
    """
    bits = values.view(np.uint32)
    high = bits >> _SHIFT
    # Half of the last place that stays, a little less where that place is even.
    rounded = (bits + (_HALF + (high & _ONE))) >> _SHIFT
    words: npt.NDArray[np.uint16] = np.where(np.isnan(values), high | _QUIET, rounded).astype(np.uint16)
    return words
