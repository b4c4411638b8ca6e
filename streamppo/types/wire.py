"""The wire format: the base of everything that crosses a process, its encoding, and the arrays in its columns."""

from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]
Flags: TypeAlias = NDArray[np.bool_]
Routes: TypeAlias = NDArray[np.int16]
T = TypeVar("T")


class WireStruct(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of everything that crosses a process: immutable, compared by value, without reference cycles."""


def encode(value: object) -> bytes:
    """`value` (a struct, or a tuple of them) as msgpack bytes."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """The inverse of `encode`. Raises `msgspec.ValidationError` if `data` is not a `kind`."""
    return msgspec.msgpack.decode(data, type=kind)


def utf8_safe(text: object) -> str:
    """`text` as valid UTF-8, so that it can cross a process: an unpaired surrogate becomes a question mark."""
    return str(text).encode(errors="replace").decode()


def ints(column: bytes) -> Ints:
    """A bytes column of int32, as a read-only array without a copy."""
    return np.frombuffer(column, dtype="<i4")


def floats(column: bytes) -> Floats:
    """A bytes column of float32, as a read-only array without a copy."""
    return np.frombuffer(column, dtype="<f4")


def flags(column: bytes) -> Flags:
    """A bytes column of booleans, one byte each, as a read-only array without a copy."""
    return np.frombuffer(column, dtype=np.bool_)
