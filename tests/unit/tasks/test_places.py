"""Other people's code that raises is told with its file and line, wherever it is called."""

from collections.abc import Callable
from pathlib import Path

import pytest

from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.tasks.rewards import signature
from streamppo.tasks.scorers.code import CodeTests

IN_THE_MODULE = "\nraise RuntimeError('no')"
IN_THE_CONSTRUCTOR = """
class Found:
    def __init__(self):
        raise RuntimeError('no')

    def __call__(self, trajectory): ...
"""
EXITS = IN_THE_CONSTRUCTOR.replace("raise RuntimeError('no')", "raise SystemExit(3)")


PANICS = "class Panic(BaseException): ...\n"
"""A library in Rust panics with an error that is no Exception."""


def reward(name: str) -> object:
    return signature.load(name, {})


def sandbox(name: str) -> object:
    return CodeTests(sandbox=name)


def imported(name: str) -> object:
    return plugins.load(name, "plug-in")


@pytest.mark.parametrize(
    ("source", "called", "told"),
    [
        (IN_THE_MODULE, imported, r"mine\.py:2: RuntimeError: no$"),
        (IN_THE_CONSTRUCTOR, reward, r"mine\.py:4: RuntimeError: no$"),
        (IN_THE_CONSTRUCTOR, sandbox, r"mine\.py:4: RuntimeError: no$"),
        (EXITS, reward, r"mine\.py:4: sys\.exit\(3\)$"),
        (EXITS, sandbox, r"mine\.py:4: sys\.exit\(3\)$"),
        (PANICS + "raise Panic('no')", imported, r"mine\.py:2: Panic: no$"),
        (PANICS + IN_THE_CONSTRUCTOR.replace("RuntimeError", "Panic"), reward, r"mine\.py:5: Panic: no$"),
        (PANICS + IN_THE_CONSTRUCTOR.replace("RuntimeError", "Panic"), sandbox, r"mine\.py:5: Panic: no$"),
    ],
)
def test_a_plug_in_that_cannot_be_made_is_told_with_its_line(
    tmp_path: Path, source: str, called: Callable[[str], object], told: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(TaskError, match=told):
        called(f"{tmp_path / 'mine.py'}:Found")


def test_lines_of_python_and_of_this_package_tell_nothing_and_are_left_out() -> None:
    with pytest.raises(TaskError, match=r"failed: ModuleNotFoundError: No module named 'nowhere'$"):
        imported("nowhere:score")
