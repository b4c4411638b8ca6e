"""Values as JSON and back, by exact type, between processes that do not trust each other. Imports nothing of ours."""

import builtins
import numbers
from collections.abc import Callable
from typing import NoReturn, TypeAlias

Data: TypeAlias = "bool | int | str | list[Data] | dict[str, Data] | None"
"""A value as JSON; lists, tuples, sets, floats and so on are objects of one key that names the type."""
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
    """A value that cannot cross."""


def encode(value: object, other: Callable[[object], Data]) -> Data:
    """Write a value as data; subclasses become the type that they extend, and `other` writes all else."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case numbers.Integral():
            whole = int(value)
            return whole if abs(whole) < SMALL else {"int": hex(whole)}
        case float():
            return {"float": float(value).hex()}
        case complex():
            return {"complex": [float(value.real).hex(), float(value.imag).hex()]}
        case bytes() | bytearray():
            return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
        case range():
            return {"range": [value.start, value.stop, value.step]}
        case dict():
            return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
        case list() | tuple() | set() | frozenset():
            kind = next(one for one in (list, tuple, set, frozenset) if isinstance(value, one))
            return {kind.__name__: [encode(item, other) for item in value]}
        case _:
            return other(value)


def decode(data: Data, answers: Callable[[int], object]) -> object:
    """Read what `encode` has written: values of exactly Python's own types.

    `answers` gives what {"answer": n} means, on the program's side; {"builtin": name} is a function of Python's, there.
    """
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
        pairs = [[decode(one, answers) for one in as_list(pair)] for pair in inside]
        return {key: item for key, item in pairs}
    return PLAIN[kind](inside)


def data_alone(_: object) -> NoReturn:
    """Refuse what is no data: for `encode` and `decode`."""
    raise NotData


def as_list(data: Data) -> list[Data]:
    """Return a list as it is; all else counts as empty."""
    return data if isinstance(data, list) else []
