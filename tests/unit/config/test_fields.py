"""The list of fields is frozen in fields.txt, by their names in a file: a change of it is a decision."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from conftest import REPOSITORY
from msgspec import inspect

from streamppo.config.sections import Config

FROZEN = Path(__file__).with_name("fields.txt")


def paths(node: inspect.Type, at: str) -> Iterator[str]:
    """Dotted names of the fields below `node`; a kind stands in parentheses, NAME for an entry of a table."""
    match node:
        case inspect.StructType(fields=fields, tag=tag):
            here = f"{at}({tag})" if tag else at
            yield from [here] if tag and not fields else ()
            for field in fields:
                yield from paths(field.type, f"{here}.{field.encode_name}" if here else field.encode_name)
        case inspect.UnionType(types=types) if any(isinstance(option, inspect.StructType) for option in types):
            for option in types:
                yield from paths(option, at)
        case inspect.DictType(value_type=inspect.StructType() | inspect.UnionType() as value):
            yield from paths(value, f"{at}.NAME")
        case inspect.VarTupleType(item_type=inspect.StructType() | inspect.UnionType() as item):
            yield from paths(item, f"{at}[]")
        case inspect.NoneType():
            return
        case _:
            yield at


def undocumented(files: Sequence[Path]) -> Iterator[str]:
    """Struct.field of every field without a sentence under it."""
    for node in (node for file in files for node in ast.parse(file.read_text()).body):
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "frozen" for keyword in node.keywords):
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and not _is_sentence(below):
                    yield f"{node.name}.{ast.unparse(field.target)}"


def _is_sentence(node: ast.stmt | None) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str) and node.value.value.endswith(".")


def test_the_list_of_fields_is_frozen() -> None:
    present, frozen = set(paths(inspect.type_info(Config), "")), set(FROZEN.read_text().splitlines())
    changes = [f"new: {name}" for name in sorted(present - frozen)]
    changes += [f"gone: {name}" for name in sorted(frozen - present)]
    assert not changes, f"{FROZEN.name} says otherwise; if this is meant, write it there"


def test_every_field_has_a_sentence_under_it(tmp_path: Path) -> None:
    assert list(undocumented(sorted((REPOSITORY / "streamppo" / "config").glob("*.py")))) == []
    planted = tmp_path / "planted.py"
    planted.write_text('class A(Section, frozen=True):\n    told: int\n    """So."""\n    untold: int = 1\n')
    assert list(undocumented([planted])) == ["A.untold"]
