"""Converts values to JSON and back, by exact type, between processes without mutual trust. Imports no code of ours."""

import builtins
import importlib
import numbers
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

Data: TypeAlias = "bool | int | str | list[Data] | dict[str, Data] | None"
"""A value as JSON; lists, tuples, sets, floats and so on are objects with one key, the type's name."""
SMALL = 2**53
PLAIN: dict[str, Callable[..., object]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
}
LISTS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class NotData(Exception):
    """A value cannot be sent as data."""


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _parts(array: Any) -> list[Any]:
    if array.dtype.kind not in "biufc":
        raise NotData
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _ndarray(kind: str, shape: list[int], items: bytes) -> Any:
    if kind[1:2] not in tuple("biufc"):
        raise NotData
    return _attribute("numpy", "frombuffer")(items, kind).reshape(shape).copy()


LIBRARY: dict[str, tuple[str, Callable[[Any], list[Any]], Callable[..., object]]] = {
    "Decimal": ("decimal", lambda value: [str(value)], lambda text: _attribute("decimal", "Decimal")(str(text))),
    "Fraction": (
        "fractions",
        lambda value: [value.numerator, value.denominator],
        lambda *parts: _attribute("fractions", "Fraction")(*parts[:2]),
    ),
    "timedelta": (
        "datetime",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda *parts: _attribute("datetime", "timedelta")(*parts[:3]),
    ),
    **{
        name: (
            "datetime",
            lambda value: [value.isoformat()],
            lambda text, name=name: _attribute("datetime", name).fromisoformat(text),
        )
        for name in ("datetime", "date", "time")
    },
    "Counter": (
        "collections",
        lambda value: [dict(value)],
        lambda value: _attribute("collections", "Counter")(dict(value)),
    ),
    "OrderedDict": (
        "collections",
        lambda value: [dict(value)],
        lambda value: _attribute("collections", "OrderedDict")(dict(value)),
    ),
    "deque": (
        "collections",
        lambda value: [list(value), value.maxlen],
        lambda items, maxlen: _attribute("collections", "deque")(list(items), maxlen),
    ),
    "array": (
        "array",
        lambda value: [value.typecode, value.tobytes()],
        lambda code, items: _attribute("array", "array")(str(code), bytes(items)),
    ),
    "ndarray": ("numpy", _parts, _ndarray),
    "generic": ("numpy", _parts, lambda *parts: _ndarray(*parts)[()]),
}
"""Library classes by name: (module, value -> data, data -> a value of exactly this class)."""


def encode(value: object, other: Callable[[object], Data]) -> Data:
    """Encode a value as data. A subclass becomes its base type; `other` encodes values of unknown types."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case numbers.Integral():
            integer = int(value)
            return integer if abs(integer) < SMALL else {"int": hex(integer)}
        case float():
            return {"float": float(value).hex()}
        case complex():
            return {"complex": [float(value.real).hex(), float(value.imag).hex()]}
        case bytes() | bytearray():
            return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
        case range():
            return {"range": [value.start, value.stop, value.step]}
        case _ if (encoded := _encode_library_value(value, other)) is not None:
            return encoded
        case dict():
            return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
        case list() | tuple() | set() | frozenset():
            kind = next(candidate for candidate in (list, tuple, set, frozenset) if isinstance(value, candidate))
            return {kind.__name__: [encode(item, other) for item in value]}
        case _:
            return other(value)


def decode(data: Data, answers: Callable[[int], object]) -> object:
    """Decode data of `encode`. The program's side passes `answers` for {"answer": n}, and thereby allows builtins."""
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("a list without its type")
        return data
    ((kind, inside),) = data.items()
    if kind == "answer" and isinstance(inside, int):
        return answers(inside)
    if kind == "builtin" and answers is not data_alone:
        return getattr(builtins, str(inside))
    if kind in LISTS and isinstance(inside, list):
        return LISTS[kind](decode(item, answers) for item in inside)
    if kind == "dict" and isinstance(inside, list):
        pairs = [[decode(element, answers) for element in as_list(pair)] for pair in inside]
        return {key: item for key, item in pairs}
    if kind in LIBRARY:
        return LIBRARY[kind][2](*(decode(item, answers) for item in as_list(inside)))
    if kind == "namedtuple":
        name, fields, items = (decode(item, answers) for item in as_list(inside))
        return _attribute("collections", "namedtuple")(name, fields)(*items)  # pyright: ignore[reportGeneralTypeIssues]
    return PLAIN[kind](inside)


def _encode_library_value(value: object, other: Callable[[object], Data]) -> Data:
    """Encode a value of a class in `LIBRARY`; None for other values. The check imports no library."""
    fields = getattr(type(value), "_fields", None)
    if isinstance(value, tuple) and isinstance(fields, tuple):
        parts = [type(value).__name__, list(fields), list(value)]
        return {"namedtuple": [encode(part, other) for part in parts]}
    for name, (module, parts_of, _) in LIBRARY.items():
        known = getattr(sys.modules.get(module), name, None)
        if isinstance(known, type) and isinstance(value, known):
            return {name: [encode(part, other) for part in parts_of(value)]}
    return None


def data_alone(_: object) -> NoReturn:
    """Raise `NotData`: the callback for `encode` and `decode` where only data is allowed."""
    raise NotData


def as_list(data: Data) -> list[Data]:
    """Return a list unchanged, and an empty list for anything else."""
    return data if isinstance(data, list) else []
