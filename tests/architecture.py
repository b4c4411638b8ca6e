"""Measures the package: `python -m tests.architecture --table [FOLDER ...]` prints one column for each checkout.

Each measure is a number and the places that it is made of; `BOUNDS` are held by tests/unit/test_architecture.py.
"""

import argparse
import ast
import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parent.parent
BOUNDS = {
    "files at the top of streamppo/": 8,
    "packages": 19,
    "modules in an import cycle": 0,
    "packages in an import cycle": 0,
    "steps of the declared path not in the code": 0,
    "frames from the command to backward()": 5,
    "files on that path": 5,
    "Any per 1,000 lines": 4,
    "broad excepts": 23,
    "print": 1,
    "print outside commands": 0,
    "largest file": 400,
    "longest function": 60,
    "most parameters before *": 6,
    "deepest nesting": 3,
    "undocumented public things": 0,
    "class names with several meanings": 0,
    "pure modules that are not": 0,
}
"""The most that each measure may be."""
BROAD = ("Exception", "BaseException")
NESTS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
PATH_TO_BACKWARD = (
    ("cli", "run"),
    ("loop", "run"),
    ("loop", "train"),
    ("learner/rank", "update"),
    ("learner/update", "update"),
)
"""The frames between the command and `.backward()`: each function calls the next, the last one calls `.backward()`."""


class Source(NamedTuple):
    """One file of the package: its dotted name, its text, its syntax tree and all nodes of that."""

    name: str
    path: Path
    text: str
    tree: ast.Module
    nodes: Sequence[ast.AST]


Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(repository: Path = REPOSITORY) -> list[Source]:
    """Every Python file of streamppo/, by path."""
    found = []
    for path in sorted((repository / "streamppo").rglob("*.py")):
        relative = path.relative_to(repository).with_suffix("")
        name = ".".join(part for part in relative.parts if part != "__init__")
        text = path.read_text()
        tree = ast.parse(text)
        found.append(Source(name, path, text, tree, [*ast.walk(tree)]))
    return found


# --- units and arrows ----------------------------------------------------------------------------------------


def unit(name: str) -> str:
    """The folder or file at the top of streamppo/ that has a module."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports(source: Source, known: set[str]) -> Iterator[str]:
    """The modules of streamppo that a file imports, anywhere in it."""
    for node in source.nodes:
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
    return _in_cycles({source.name: {to for to in imports(source, known) if to != source.name} for source in found})


def unit_cycles(found: Sequence[Source]) -> list[str]:
    """Units that import each other, directly or through others."""
    edges: dict[str, set[str]] = {}
    for importer, imported in arrows(found):
        edges.setdefault(importer, set()).add(imported)
    return _in_cycles(edges)


def _in_cycles(edges: dict[str, set[str]]) -> list[str]:
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


def functions(source: Source) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in source.nodes if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines of a function, its decorators left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: Function) -> int:
    """Parameters before `*`; self, cls and autograd's ctx are not counted."""
    positional = [*function.args.posonlyargs, *function.args.args]
    return len([argument for argument in positional if argument.arg not in ("self", "cls", "ctx")])


def nesting(node: ast.AST) -> int:
    """The deepest chain of blocks under `node`; an elif is no deeper than its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda):
            continue
        elif_branch = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        own = isinstance(child, NESTS) and not elif_branch
        deepest = max(deepest, own + nesting(child))
    return deepest


def undocumented(found: Sequence[Source]) -> list[str]:
    """Modules, and public classes and functions at the top of a module, without a docstring."""
    missing = []
    for source in found:
        public = [node for node in source.tree.body if isinstance(node, Function | ast.ClassDef)]
        for node in [source.tree, *(node for node in public if not node.name.startswith("_"))]:
            if source.text.strip() and ast.get_docstring(node) is None:
                missing.append(f"{source.name}: {getattr(node, 'name', 'module')}")
    return missing


def docstrings(found: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """(file and name, docstring) of every module, class and function, and of every documented constant or field."""
    for source in found:
        for node in source.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                yield f"{source.name}: {getattr(node, 'name', 'module')}", text
            body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
            for before, after in pairwise(body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (text := _text(after)):
                    yield f"{source.name}: {ast.unparse(before).split('=')[0].strip()}", text


def _text(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value.strip()
    return None


def uses_of_any(found: Sequence[Source]) -> list[str]:
    """Uses of `Any`, those in quoted types too, as module:line; its imports are left out."""
    return [
        f"{source.name}:{getattr(node, 'lineno', 0)}"
        for source in found
        for node in source.nodes
        if _is_any(node) or (isinstance(node, ast.Constant) and isinstance(node.value, str) and _has_any(node.value))
    ]


def _is_any(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")


def _has_any(text: str) -> bool:
    if "Any" not in text:
        return False
    try:
        return any(_is_any(node) for node in ast.walk(ast.parse(text, mode="eval")))
    except SyntaxError:
        return False


def broad_excepts(found: Sequence[Source]) -> list[str]:
    """Handlers of all exceptions, as module:line."""
    return [
        f"{source.name}:{node.lineno}"
        for source in found
        for node in source.nodes
        if isinstance(node, ast.ExceptHandler) and (node.type is None or set(_names(node.type)) & set(BROAD))
    ]


def _names(node: ast.AST) -> Iterator[str]:
    return (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def prints(found: Sequence[Source]) -> list[str]:
    """Calls of print, as module:line."""
    return [
        f"{source.name}:{node.lineno}"
        for source in found
        for node in source.nodes
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
    """Steps of `path` that the code lacks: a missing function, or one that does not call the next."""
    by_name = {source.name: source for source in found}
    wrong = []
    for (module, name), after in zip(path, [*path[1:], ("", "backward")], strict=True):
        source = by_name.get(f"streamppo.{module.replace('/', '.')}")
        bodies = [node for node in functions(source) if node.name == name] if source else []
        if not any(after[1] in _called(body) for body in bodies):
            wrong.append(f"{module}.{name} -> {after[1]}")
    return wrong


def _called(body: ast.AST) -> set[str]:
    """Names of the functions and methods that `body` calls or hands on."""
    names = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute)}


# --- the table -----------------------------------------------------------------------------------------------


class Measure(NamedTuple):
    """A number, and the places behind it."""

    value: float
    places: Sequence[str] = ()


def count(places: Sequence[str]) -> Measure:
    """The number of places."""
    return Measure(len(places), places)


def largest(sizes: dict[str, int]) -> Measure:
    """The largest size, and the three places that have the largest ones."""
    return Measure(max(sizes.values()), sorted(sizes, key=lambda place: -sizes[place])[:3])


def homonyms(found: Sequence[Source]) -> list[str]:
    """Class names with several meanings. A table of the configuration may have the name of its object."""
    places: dict[str, list[str]] = {}
    for source in found:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and not source.name.startswith("streamppo.config."):
                places.setdefault(node.name, []).append(source.name)
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def impure(found: Sequence[Source]) -> list[str]:
    """Modules whose docstring calls them pure although they import a process, file, database or event loop."""
    return [
        f"{source.name} imports {name}"
        for source in found
        if re.search(r"\bPure\b", ast.get_docstring(source.tree) or "")
        for name in ("ray", "sqlite3", "asyncio", "pathlib")
        if re.search(rf"^\s*(?:import|from) {name}\b", source.text, re.MULTILINE)
    ]


def measures(found: Sequence[Source], path: Sequence[tuple[str, str]] = PATH_TO_BACKWARD) -> dict[str, Measure]:
    """The package in numbers; `path` are the declared frames from the command to `.backward()`."""
    found = [source for source in found if source.text.strip()]
    lines = {source.name: len(source.text.splitlines()) for source in found}
    inside = [(f"{source.name}: {function.name}", function) for source in found for function in functions(source)]
    total, anys = sum(lines.values()), uses_of_any(found)
    return {
        "lines": Measure(total),
        "files at the top of streamppo/": count([s.name for s in found if s.path.parent.name == "streamppo"]),
        "packages": count(sorted({unit(source.name) for source in found} - {"streamppo"})),
        "imports between packages": count([f"{a} -> {b}" for a, b in sorted(arrows(found))]),
        "modules in an import cycle": count(cycles(found)),
        "packages in an import cycle": count(unit_cycles(found)),
        "steps of the declared path not in the code": count(breaks_in_path(found, path)),
        "frames from the command to backward()": count([f"{module}.{name}" for module, name in path]),
        "files on that path": count(sorted({module for module, _ in path})),
        "config fields declared": count(config_fields(found)),
        "Any per 1,000 lines": Measure(round(1000 * len(anys) / total, 1), anys),
        "broad excepts": count(broad_excepts(found)),
        "print": count(prints(found)),
        "print outside commands": count([place for place in prints(found) if ".commands." not in place]),
        "median file": Measure(statistics.median(lines.values())),
        "largest file": largest(lines),
        "longest function": largest({place: length(function) for place, function in inside}),
        "most parameters before *": largest({place: parameters(function) for place, function in inside}),
        "deepest nesting": largest({place: nesting(function) for place, function in inside}),
        "undocumented public things": count(undocumented(found)),
        "class names with several meanings": count(homonyms(found)),
        "pure modules that are not": count(impure(found)),
        "docstrings": Measure(len(list(docstrings(found)))),
    }


def main() -> None:
    """Print the table, one column for each folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table (the only thing that this can do)")
    parser.add_argument("folders", nargs="*", type=Path, default=[REPOSITORY], help="checkouts (default: this one)")
    folders = parser.parse_args().folders
    columns = [measures(sources(folder.resolve())) for folder in folders]
    print(f"{'':44}" + "".join(f"{folder.name:>16}" for folder in folders))
    for name in columns[0]:
        print(f"{name:44}" + "".join(f"{column[name].value:>16g}" for column in columns))


if __name__ == "__main__":
    main()
