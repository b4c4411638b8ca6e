"""How the house is kept: format, lint, types, import direction, sizes, words."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

SOURCES = sorted((REPOSITORY / "streamppo").rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_NESTING = 400, 60, 6, 3
NESTS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def tool(*command: str) -> None:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing_to_format() -> None:
    tool(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_ruff_finds_nothing_to_lint() -> None:
    tool(sys.executable, "-m", "ruff", "check", ".")


def test_pyright_finds_no_error() -> None:
    tool(sys.executable, "-m", "pyright", "--pythonpath", sys.executable)


def test_imports_go_down_only() -> None:
    tool(str(Path(sys.executable).parent / "lint-imports"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    for function in functions(ast.parse(text)):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= MAX_FUNCTION, f"{function.name} has {lines} lines"
        positional = [*function.args.posonlyargs, *function.args.args]
        names = [argument.arg for argument in positional if argument.arg not in ("self", "cls", "ctx")]
        assert len(names) <= MAX_PARAMETERS, f"{function.name} takes {len(names)} parameters before *"
        assert nesting(function) <= MAX_NESTING, f"{function.name} nests {nesting(function)} deep"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def nesting(node: ast.AST, *, chained: bool = False) -> int:
    """The deepest chain of blocks under `node`; an elif is no deeper than its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif_branch = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        own = isinstance(child, NESTS) and not elif_branch
        deepest = max(deepest, own + nesting(child))
    return deepest


def test_every_public_thing_has_a_docstring() -> None:
    missing = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        public = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        for node in [tree, *(node for node in public if not node.name.startswith("_"))]:
            if ast.get_docstring(node) is None and path.read_text().strip():
                missing.append(f"{path.name}: {getattr(node, 'name', 'module')}")
    assert missing == []


@pytest.mark.parametrize("word", ["old_log" + "probs", "old_logp", "TO" + "DO", "FIX" + "ME", "pickle.lo" + "ads"])
def test_banned_words_do_not_occur(word: str) -> None:
    assert [path for path in SOURCES if word in path.read_text()] == []


def test_every_metric_of_an_update_is_in_the_catalogue() -> None:
    """The names that the learner writes, found in its source, are the catalogue's names."""
    from streamppo.telemetry.catalogue import UPDATE

    learner = "".join(path.read_text() for path in SOURCES if path.parent.name == "learner")
    assert [name for name in UPDATE if f'"{name}"' not in learner] == []


def test_the_constraints_pin_what_the_project_asks_for() -> None:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["gym"], *extras["math"]]
    names = {requirement.split(">=")[0].split("[")[0].lower() for requirement in wanted} - {"streamppo"}
    assert names <= pinned, names - pinned
