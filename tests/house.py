"""Measures the house: `python -m tests.house --table [FOLDER ...]` prints one column for each checkout.

The bounds that tests hold are in tests/unit/test_house.py; what is counted, and how, is here.
"""

import argparse
import ast
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parent.parent
WH_WORDS = ("whoever", "whatever", "what", "those", "one that", "who", "which", "whether", "where", "whom", "whose")
"""Words that no docstring begins with: a docstring begins with a verb or names its subject."""
BROAD = ("Exception", "BaseException")
PATH_TO_BACKWARD = (
    ("cli", "run"),
    ("run", "run"),
    ("run", "train"),
    ("learner/rank", "update"),
    ("learner/update", "update"),
    ("learner/update", "_optimize"),
    ("learner/update", "_backward"),
)
"""The frames between the command and `.backward()`: each function calls the next, the last one calls `.backward()`."""


class Source(NamedTuple):
    """One file of the package: its dotted name, its text, its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module


Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(repository: Path = REPOSITORY) -> list[Source]:
    """Every Python file of streamppo/, by path."""
    found = []
    for path in sorted((repository / "streamppo").rglob("*.py")):
        relative = path.relative_to(repository).with_suffix("")
        name = ".".join(part for part in relative.parts if part != "__init__")
        text = path.read_text()
        found.append(Source(name, path, text, ast.parse(text)))
    return found


# --- units and arrows ----------------------------------------------------------------------------------------


def unit(name: str) -> str:
    """The room or the file at the top of streamppo/ to which a module belongs."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports(source: Source, known: set[str]) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "streamppo")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "streamppo":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


def arrows(found: Sequence[Source]) -> set[tuple[str, str]]:
    """(importing unit, imported unit), each pair once."""
    known = {source.name for source in found}
    pairs = {(unit(source.name), unit(to)) for source in found for to in imports(source, known)}
    return {(a, b) for a, b in pairs if b not in (a, "streamppo")}


def cycles(found: Sequence[Source]) -> list[str]:
    """Modules that import each other, directly or through others; empty where imports make no cycle."""
    known = {source.name for source in found}
    edges = {source.name: {to for to in imports(source, known) if to != source.name} for source in found}
    return sorted(name for name in edges if name in _reachable(name, edges))


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += edges.get(name, ())
    return seen


# --- functions, words, types ---------------------------------------------------------------------------------


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines of a function, its decorators left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def docstrings(found: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """(file and name, docstring) of every module, class and function, and of every documented constant or field."""
    for source in found:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                yield f"{source.path.name}: {getattr(node, 'name', 'module')}", text
            body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
            for before, after in pairwise(body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (text := _text(after)):
                    yield f"{source.path.name}: {ast.unparse(before).split('=')[0].strip()}", text


def _text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value.strip()
    return None


def begins_wrong(text: str) -> bool:
    """A docstring's first words are a wh-word, or one of their kin."""
    lowered = text.lower()
    return any(lowered.startswith(f"{word} ") for word in WH_WORDS)


def count_any(found: Sequence[Source]) -> int:
    """Uses of `Any`, its imports left out."""
    nodes = (node for source in found for node in ast.walk(source.tree))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def broad_excepts(found: Sequence[Source]) -> list[str]:
    """Handlers of every exception there is, as file:line."""
    return [
        f"{source.path.name}:{node.lineno}"
        for source in found
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and (node.type is None or set(_names(node.type)) & set(BROAD))
    ]


def _names(node: ast.AST) -> Iterator[str]:
    return (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def prints(found: Sequence[Source]) -> list[str]:
    """Calls of print, as file:line."""
    return [
        f"{source.path.name}:{node.lineno}"
        for source in found
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def config_fields(found: Sequence[Source]) -> list[str]:
    """The fields that the configuration's structs declare, as Struct.field."""
    fields = []
    for source in found:
        if not source.name.startswith("streamppo.config"):
            continue
        for node in (node for node in source.tree.body if isinstance(node, ast.ClassDef)):
            if any(keyword.arg == "frozen" for keyword in node.keywords):
                inner = [stmt for stmt in node.body if isinstance(stmt, ast.AnnAssign)]
                fields += [f"{node.name}.{ast.unparse(field.target)}" for field in inner]
    return fields


def breaks_in_path(found: Sequence[Source], path: Sequence[tuple[str, str]] = PATH_TO_BACKWARD) -> list[str]:
    """Steps of `path` that are not in the code: a function that is not there, or that does not call the next one."""
    by_name = {source.name: source for source in found}
    wrong = []
    for (module, name), after in zip(path, [*path[1:], ("", "backward")], strict=True):
        source = by_name.get(f"streamppo.{module.replace('/', '.')}")
        bodies = [node for node in functions(source.tree) if node.name == name] if source else []
        if not any(after[1] in _called(body) for body in bodies):
            wrong.append(f"{module}.{name} -> {after[1]}")
    return wrong


def _called(body: ast.AST) -> set[str]:
    """Names of the functions and methods that `body` calls or hands on."""
    names = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute)}


# --- the table -----------------------------------------------------------------------------------------------


def table(repository: Path) -> dict[str, str]:
    """The house in numbers."""
    found = [source for source in sources(repository) if source.text.strip()]
    lines = {source: len(source.text.splitlines()) for source in found}
    total = sum(lines.values())
    longest = max(length(function) for source in found for function in functions(source.tree))
    texts = list(docstrings(found))
    path_is_there = not breaks_in_path(found)
    return {
        "lines": f"{total}",
        "files at the top of streamppo/": f"{len(list((repository / 'streamppo').glob('*.py')))}",
        "units": f"{len({unit(source.name) for source in found} - {'streamppo'})}",
        "arrows between units": f"{len(arrows(found))}",
        "modules in an import cycle": f"{len(cycles(found))}",
        "frames from the command to backward()": f"{len(PATH_TO_BACKWARD)}" if path_is_there else "another path",
        "files on that path": f"{len({module for module, _ in PATH_TO_BACKWARD})}" if path_is_there else "another path",
        "config fields declared": f"{len(config_fields(found))}",
        "Any per 1,000 lines": f"{1000 * count_any(found) / total:.1f}",
        "broad excepts": f"{len(broad_excepts(found))}",
        "print": f"{len(prints(found))}",
        "median file": f"{statistics.median(lines.values()):g}",
        "largest file": f"{max(lines.values())}",
        "longest function": f"{longest}",
        "docstrings": f"{len(texts)}",
        "of them begin with a wh-word": f"{sum(begins_wrong(text) for _, text in texts)}",
    }


def main() -> None:
    """Print the table, one column for each folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table (the only thing that this can do)")
    parser.add_argument("folders", nargs="*", type=Path, default=[REPOSITORY], help="checkouts (default: this one)")
    columns = [table(folder.resolve()) for folder in parser.parse_args().folders]
    print(f"{'':40}" + "".join(f"{folder.name:>16}" for folder in parser.parse_args().folders))
    for name in columns[0]:
        print(f"{name:40}" + "".join(f"{column[name]:>16}" for column in columns))


if __name__ == "__main__":
    main()
