"""Reads JSON of programs and of the policy strictly: NaN, 1e999 or half a surrogate pair may break other readers."""

import math

import msgspec

LARGEST = 2**63
"""Whole numbers from this one on become floats, because processes do not exchange them."""
FLOAT_BITS = 1023
DEPTH = 100


def read(text: str | bytes) -> object:
    """Read a value. Raises `ValueError` if it is not JSON, or nested deeper than `DEPTH`."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(str(error)) from error
    plain(value)
    return value


def plain(value: object, depth: int = DEPTH) -> object:
    """Return a value that processes can exchange: floats from `LARGEST` on. Raises `ValueError` if too deep."""
    if not depth:
        raise ValueError(f"it is nested deeper than {DEPTH} times")
    match value:
        case dict():
            return {name: plain(item, depth - 1) for name, item in value.items()}
        case list():
            return [plain(item, depth - 1) for item in value]
        case int() if abs(value) >= LARGEST:
            return float(value) if value.bit_length() <= FLOAT_BITS else math.inf if value > 0 else -math.inf
    return value
