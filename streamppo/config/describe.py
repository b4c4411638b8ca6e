"""Describes in plain words the valid values of a field, and a given value."""

from collections.abc import Sequence

from msgspec import inspect

BOUNDS = {"gt": "above {}", "ge": "of at least {}", "lt": "below {}", "le": "of at most {}"}


def describe_type(node: inspect.Type) -> str:
    """The values of a type: "a number above 0"."""
    match node:
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a text"
        case inspect.IntType():
            return _bounded("a whole number", node)
        case inspect.FloatType():
            return _bounded("a number", node)
        case inspect.LiteralType(values=values):
            return join_names([f'"{value}"' for value in values], "or")
        case inspect.TupleType(item_types=types):
            return f"a list of {len(types)}: {join_names([describe_type(item) for item in types])}"
        case inspect.VarTupleType(item_type=item):
            return f"a list, each of it {describe_type(item)}"
        case inspect.UnionType(types=types):
            words = [describe_type(option) for option in types if not isinstance(option, inspect.NoneType)]
            return join_names(list(dict.fromkeys(words)), "or")
        case _:
            return "a table"


def format_value(value: object) -> str:
    """A value as written in the file; a table becomes "a table"."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def join_names(names: Sequence[str], last: str = "and") -> str:
    """Join names for a sentence: "a, b and c"."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _bounded(noun: str, node: inspect.IntType | inspect.FloatType) -> str:
    bounds = {"gt": node.gt, "ge": node.ge, "lt": node.lt, "le": node.le}
    words = [BOUNDS[name].format(f"{bound:g}") for name, bound in bounds.items() if bound is not None]
    return " ".join([noun, " and ".join(words)]) if words else noun
