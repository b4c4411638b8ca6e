"""The wire format: the base class of all messages between processes, their encoding, and their arrays."""

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
    """Base class of everything that crosses a process: immutable, compared by value, without reference cycles."""


def encode(value: object) -> bytes:
    """Return a struct, or a tuple of structs, as msgpack bytes."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """The inverse of `encode`. Raises `msgspec.ValidationError` if `data` is not a `kind`."""
    return msgspec.msgpack.decode(data, type=kind)


def utf8_safe(text: object) -> str:
    """Return `text` as valid UTF-8 that can cross a process. An unpaired surrogate becomes a question mark."""
    return str(text).encode(errors="replace").decode()


def ints(column: bytes) -> Ints:
    """Return a bytes column of int32 as a read-only array without a copy."""
    return np.frombuffer(column, dtype="<i4")


def floats(column: bytes) -> Floats:
    """Return a bytes column of float32 as a read-only array without a copy."""
    return np.frombuffer(column, dtype="<f4")


def flags(column: bytes) -> Flags:
    """Return a bytes column of booleans, one byte each, as a read-only array without a copy."""
    return np.frombuffer(column, dtype=np.bool_)
