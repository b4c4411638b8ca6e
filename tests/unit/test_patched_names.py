"""Tests replace names that exist: a slow test that names a moved function would fail long after the move."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def patched(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, module of streamppo, name) of each `setattr(module, "name", ...)` in a file of tests.

    Example: `from streamppo.telemetry import host` and `monkeypatch.setattr(host, "cores", two)` in line 9 give
    (9, "streamppo.telemetry.host", "cores").
    """
    nodes = [*ast.walk(ast.parse(text))]
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamppo")
        for alias in node.names
    }
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Name(of), ast.Constant(str(name)), *_]):
                if of in modules:
                    yield node.lineno, modules[of], name


def exists(module: str, name: str) -> bool:
    """Whether a module, or a class of a module, has a name."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        parent, _, of = module.rpartition(".")
        return hasattr(getattr(importlib.import_module(parent), of), name)


@pytest.mark.parametrize("room", sorted(path.name for path in TESTS.iterdir() if [*path.rglob("*.py")]))
def test_what_a_test_replaces_is_there(room: str) -> None:
    missing = [
        f"{path.relative_to(TESTS)}:{line}: {module} has no {name}"
        for path in sorted((TESTS / room).rglob("*.py"))
        for line, module, name in patched(path.read_text())
        if not exists(module, name)
    ]
    assert not missing, "\n".join(missing)


def test_a_name_that_moved_is_found() -> None:
    text = 'from streamppo.telemetry import host\nm.setattr(host, "cores", 1)\nm.setattr(host, "gone", 1)\n'
    assert [(line, exists(module, name)) for line, module, name in patched(text)] == [(2, True), (3, False)]
