"""Writes docs/reference.md of the code: `python -m tests.reference`. tests/unit/test_reference.py holds it equal."""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import msgspec
from msgspec import inspect

from streamppo.config.convert import describe_type, format_value
from streamppo.config.sections import Config
from streamppo.telemetry import catalogue
from tests.architecture import REPOSITORY

PAGE = REPOSITORY / "docs" / "reference.md"
HEAD = """\
# Reference: every field, every metric

For users who look up a name. After this page you know a field's values and default, and what each number of a run
means. `python -m tests.reference` writes it from the code.

## Fields

`algorithm.advantage(gae).lam` is the field `lam` of `algorithm.advantage = { kind = "gae" }`; `(mask|truncate)` means
both kinds. NAME is a name of your choice, `[]` an entry of a list. Parentheses contain a field's default and values:
`(256, ≥1)`. A field without a default is required. If all fields of a kind have defaults, its name is enough:
`algorithm.advantage = "grpo"`. A function or class is `package.module:name` or `path/file.py:name`.

"""
METRICS = {
    "Lines of metrics.jsonl": catalogue.LINES,
    "Every update's line": {**catalogue.BESIDE, **catalogue.UPDATE},
    "Lines of the updates to which they apply": catalogue.SOMETIMES,
}
"""The lists of metrics by their headings."""
SIGNS = {
    r"a whole number": "int",
    r"a number": "number",
    r"true or false": "bool",
    r"a list, each of it a text": "texts",
    r"a list, each of it (.*)": r"list of \1",
    r"a list of 2: (.*) and ((?:int|number).*)": r"[\1, \2]",
    r"a text": "text",
    r"a table": "table",
    r" of at least 0 and of at most 1": " 0..1",
    r" of at least ": " ≥",
    r" and of at most ": ", ≤",
    r" of at most ": " ≤",
    r" above ": " >",
    r" and below ": ", <",
    r" below ": " <",
    r"(?<=[\[ ])(?:int|number) (?=[≥>])(?=.*\])": "",
}
"""How the page writes the words of `config.convert.describe_type`, in this order."""
PLAIN = re.compile(r"^(?:int|number|bool|text)\b")
"""Types that a default shows."""


class Field(NamedTuple):
    """One field: its dotted name, the values that it takes, its default, and the sentence under it."""

    name: str
    values: str
    default: str
    sentence: str


def sentences() -> dict[tuple[str, str], str]:
    """The sentence under each field of the configuration's structs, by struct and field."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted((REPOSITORY / "streamppo" / "config").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            for field, below in zip(node.body, node.body[1:], strict=False) if isinstance(node, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found[node.name, ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def fields(node: inspect.Type, at: str, known: Mapping[tuple[str, str], str]) -> Iterator[Field]:
    """The fields below `node`, which is at the dotted name `at`; a kind without fields is one too."""
    match node:
        case inspect.StructType(fields=inner, tag=tag, cls=cls):
            here = f"{at}({tag})" if tag else at
            if tag and not inner:
                yield Field(here, "", "", (cls.__doc__ or "").partition("\n")[0])
            for field in inner:
                name = f"{here}.{field.encode_name}" if here else field.encode_name
                below = list(fields(field.type, name, known))
                of = next((one.__name__ for one in cls.__mro__ if (one.__name__, field.name) in known), "")
                sentence = known.get((of, field.name), "")
                if isinstance(field.type, inspect.DictType) and isinstance(field.type.value_type, inspect.UnionType):
                    name = name if below else f"{name}.NAME"
                if plain := _without_tables(field.type) if below else field.type:
                    yield Field(name, describe_type(plain), _default(field), sentence)
                yield from below
        case inspect.UnionType(types=types) if any(isinstance(one, inspect.StructType) for one in types):
            for one in types:
                yield from fields(one, at, known)
        case inspect.DictType(value_type=inspect.StructType() | inspect.UnionType() as value):
            yield from fields(value, f"{at}.NAME", known)
        case inspect.VarTupleType(item_type=inspect.StructType() | inspect.UnionType() as item):
            yield from fields(item, f"{at}[]", known)
        case _:
            return


def _without_tables(node: inspect.Type) -> inspect.Type | None:
    """The values of a union that are not tables; None if there are none."""
    tables = inspect.StructType | inspect.DictType | inspect.VarTupleType | inspect.NoneType
    plain = (
        tuple(one for one in node.types if not isinstance(one, tables)) if isinstance(node, inspect.UnionType) else ()
    )
    return inspect.UnionType(plain) if plain else None


def _default(field: inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    if field.default is msgspec.NODEFAULT:
        return ""
    if isinstance(field.default, tuple):
        return "[" + ", ".join(format_value(value) for value in field.default) + "]"
    return "none" if field.default is None else format_value(field.default)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    sections: dict[str, list[Field]] = {}
    for field in fields(inspect.type_info(Config), "", sentences()):
        inside = any(mark in field.name for mark in ".(")
        sections.setdefault(field.name.partition(".")[0].partition("(")[0] if inside else "", []).append(field)
    for section, found in sections.items():
        parts.append(_list(f"### {section or 'At the top'}", [_entry(one) for one in _merged(found)]))
    parts.append("## Metrics\n\nAfter a final `_` comes a scorer, component, filter, rule or lag bucket.\n\n")
    for heading, metrics in METRICS.items():
        parts.append(_list(f"### {heading}", [f"`{name}`: {text}" for name, text in metrics.items()]))
    return "".join(parts).rstrip() + "\n"


def names(written: str) -> list[str]:
    """The fields that a name of the page stands for: `a(b|c).d` is `a(b).d` and `a(c).d`."""
    parts = [part.split("|") for part in re.split(r"[()]", written)]
    choices = [[f"({one})" for one in part] if number % 2 else part for number, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def _merged(found: list[Field]) -> Iterator[Field]:
    """Fields that differ in their kinds alone as one, where the kinds are every combination."""
    alike: dict[tuple[str, ...], list[Field]] = {}
    for one in found:
        alike.setdefault((re.sub(r"\([^)]*\)", "()", one.name), *one[1:]), []).append(one)
    for (name, *_), fields_alike in alike.items():
        kinds = zip(*(re.findall(r"\(([^)]*)\)", one.name) for one in fields_alike), strict=True)
        choices = iter(["|".join(dict.fromkeys(each)) for each in kinds])
        written = re.sub(r"\(\)", lambda _: f"({next(choices)})", name)  # noqa: B023
        if sorted(names(written)) == sorted(one.name for one in fields_alike):
            yield fields_alike[0]._replace(name=written)
        else:
            yield from fields_alike


def _entry(field: Field) -> str:
    takes = field.values
    for words, sign in SIGNS.items():
        takes = re.sub(words, sign, takes)
    if field.default not in {"", "none", "empty"}:
        takes = PLAIN.sub("", takes).strip()
        if takes.startswith('"') and field.default in (words := re.findall(r'"[^"]*"', takes)):
            words.remove(field.default)
            takes = ", ".join(words)
    about = ", ".join(part for part in (field.default and f"`{field.default}`", takes) if part)
    return f"`{field.name}`{about and f' ({about})'}: {field.sentence}"


def _list(heading: str, entries: list[str]) -> str:
    text = "\n".join("- " + " ".join(one.split()) for one in entries)
    return f"{heading}\n\n{text}\n\n"


if __name__ == "__main__":
    PAGE.write_text(page())
