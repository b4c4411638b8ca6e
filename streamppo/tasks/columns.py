"""Converts the columns that rewards get to plain Python values, and packs plain values for msgpack."""

import datetime
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple
from uuid import UUID

import msgspec
import numpy as np

from streamppo.tasks.dataset_files import Row, Unreadable

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
EXACT = frozenset({Decimal, Fraction, UUID, datetime.date, datetime.time, datetime.timedelta})
"""Further types that `plain` leaves unchanged."""

PLAIN_TYPES: Mapping[type, Callable[..., object]] = {kind: kind for kind in (int, float, bytes, Decimal, Fraction)}
"""For each of these plain types, the function that converts a value of a subclass to the type."""


class NotPlain(Exception):
    """A value cannot be made plain; the message names its type."""


class Plain(NamedTuple):
    """The plain columns of a row, and the reason for each omitted column."""

    columns: Row
    omitted: Mapping[str, str]


def plain_columns(row: Row) -> Plain:
    """Convert the columns of a row to plain values, and omit columns that cannot be converted."""
    columns: dict[str, object] = {}
    omitted: dict[str, str] = {}
    for name, value in row.items():
        try:
            columns[name] = value if type(value) in ATOMS else plain(value)
        except NotPlain as error:
            omitted[name] = str(error)
        except RecursionError:
            omitted[name] = "is nested too deeply"
    return Plain(columns, omitted)


def plain(value: object) -> object:
    """Convert a value to Python's types; tuples and arrays become lists. Raises `NotPlain` for any other value."""
    if type(value) in ATOMS or type(value) in EXACT:
        return value
    match value:
        case Unreadable():
            raise NotPlain(value.reason)
        case Mapping():
            return {_key(name): plain(item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
        case datetime.datetime():
            # The offset replaces the time zone; pandas' NaT becomes None.
            text = value.isoformat()
            return None if text == "NaT" else datetime.datetime.fromisoformat(text)
        case np.datetime64():
            # `item` would convert nanoseconds to an integer.
            return plain(value.astype("datetime64[us]").item())
        case np.timedelta64():
            return plain(value.astype("timedelta64[us]").item())
        case np.generic() | np.ndarray():
            numbers = value.tolist()
            # `tolist` leaves a long double as a numpy number.
            return float(numbers) if isinstance(numbers, np.floating) else plain(numbers)
        case bytearray() | memoryview():
            return bytes(value)
        case _:
            return _plain_subclass(value)


def _plain_subclass(value: object) -> object:
    if isinstance(value, str):
        return str.__str__(value)
    for kind, make in PLAIN_TYPES.items():
        if isinstance(value, kind):
            return make(value)
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return plain(tolist())
    raise NotPlain(f"holds values of {type(value).__module__}.{type(value).__qualname__}")


def _key(name: object) -> object:
    key = plain(name)
    return tuple(key) if isinstance(key, list) else key


INTEGER, TEXT, PAIRS = 1, 2, 3
"""Codes of the msgpack extensions that `TEXTS` lacks."""
TEXTS: Mapping[type, tuple[int, Callable[..., str], Callable[[str], object]]] = {
    Decimal: (4, str, Decimal),
    Fraction: (5, str, Fraction),
    UUID: (6, str, UUID),
    datetime.datetime: (7, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (8, datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (9, datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        10,
        lambda span: f"{span.days} {span.seconds} {span.microseconds}",
        lambda text: datetime.timedelta(*map(int, text.split())),
    ),
}
"""The types that are packed as texts: the code of the extension, and the functions to and from the text."""
READ = {INTEGER: lambda text: int(text, 16), **{code: read for code, _, read in TEXTS.values()}}


def pack(value: object) -> object:
    """Convert a plain value for msgpack; return other values unchanged."""
    kind = type(value)
    if kind is str:
        return value if _is_utf8(str(value)) else msgspec.msgpack.Ext(TEXT, str(value).encode(errors="surrogatepass"))
    if kind in (type(None), bool, float, bytes):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(INTEGER, hex(value).encode())
    if isinstance(value, dict):
        if all(type(name) is str and _is_utf8(name) for name in value):
            return {name: pack(item) for name, item in value.items()}
        pairs = [(pack(name), pack(item)) for name, item in value.items()]
        return msgspec.msgpack.Ext(PAIRS, msgspec.msgpack.encode(pairs))
    if isinstance(value, list | tuple):
        return [pack(item) for item in value]
    if kind in TEXTS:
        code, write, _ = TEXTS[kind]
        return msgspec.msgpack.Ext(code, write(value).encode())
    return value


def unpack(code: int, data: memoryview) -> object:
    """Return the value of an extension, as msgspec's `ext_hook`."""
    if code == TEXT:
        return bytes(data).decode(errors="surrogatepass")
    if code == PAIRS:
        pairs = msgspec.msgpack.decode(data, ext_hook=unpack)
        return {tuple(name) if isinstance(name, list) else name: item for name, item in pairs}
    return READ[code](bytes(data).decode())


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
