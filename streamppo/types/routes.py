"""Routes: the experts of each token of a row except the last, layer by layer. Pure: it imports only numpy.

    width    a number is    a token without experts
    2        int16          -1 in each layer
    1        uint8          255 in each number

Example: 48 layers with 8 of 128 experts give 384 numbers a token, which take 384 bytes with a width of 1. Expert 256,
or a token whose experts are missing in one layer only, needs a width of 2.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamppo.types.wire import Flags, Routes

Numbers: TypeAlias = NDArray[np.uint8 | np.int16]
UNKNOWN = 255
"""With a width of 1, a token without experts has this number in every place."""
DTYPES = {1: np.dtype("u1"), 2: np.dtype("<i2")}


def column(routes_SE: Routes) -> tuple[bytes, int]:
    """Return the bytes column of the experts, and its width: 1 if every number fits, otherwise 2."""
    width = 1 if _fits(routes_SE) else 2
    return routes_SE.astype(DTYPES[width]).tobytes(), width


def read(column: bytes, width: int, tokens: int) -> tuple[Numbers, Flags]:
    """Return [tokens, E], the experts' numbers (not copied), and [tokens], True for each token with experts."""
    numbers_SE = np.frombuffer(column, dtype=DTYPES[width]).reshape(tokens, -1)
    return numbers_SE, (numbers_SE != (UNKNOWN if width == 1 else -1)).any(axis=1)


def flaw(column: bytes, width: int, tokens: int) -> str | None:
    """Return why a column is not valid for this number of `tokens`; None if it is valid."""
    if width not in DTYPES:
        return f"routes of {width} bytes a number"
    if len(column) % (width * tokens):
        return f"routes of {len(column)} bytes for {tokens} tokens"
    lowest = np.frombuffer(column, dtype=DTYPES[width]).min(initial=0)
    return f"a route to expert {lowest}" if lowest < -1 else None


def _fits(routes_SE: Routes) -> bool:
    if routes_SE.max(initial=0) > UNKNOWN:
        return False
    lowest_S, highest_S = routes_SE.min(axis=1, initial=UNKNOWN), routes_SE.max(axis=1, initial=-1)
    is_known_S = highest_S >= 0
    return bool((lowest_S[is_known_S] >= 0).all() and (lowest_S[is_known_S] < UNKNOWN).all())
