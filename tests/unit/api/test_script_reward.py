"""A reward of a script or a notebook becomes a file of its own with the same scores; anything else is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, SUPPORT

from streamppo.api import custom_reward
from streamppo.config.reward import FunctionScorer
from streamppo.tasks import plugins
from streamppo.tasks.library import arithmetic
from streamppo.types import ScoredText

SCRIPT = '''\
from __future__ import annotations
import functools, json, linecache, re, sys
import concurrent.futures
import xml.etree.ElementTree as tree
from math import sqrt as root
from typing import TYPE_CHECKING, NamedTuple
import numpy as np
from streamppo.api import custom_reward as own_reward
from streamppo.errors import TaskError
if TYPE_CHECKING:
    from nowhere import Nothing

NUMBER = re.compile(r"\\\\d+", re.ASCII)
TABLE = {"weight": [0.5, 2.0], "names": ("a", None)}


class Part(NamedTuple):
    score: float


class Base:
    start = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.start


def counted(function):
    @functools.wraps(function)
    def inner(trajectory, **columns):
        return function(trajectory, **columns)
    return inner


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


parity = even


@counted
def everything(trajectory: Nothing, answer: str, weights: list = TABLE["weight"]) -> float:
    """Uses: {braces}, 'quotes'."""
    found = NUMBER.search(trajectory.completion)
    parts = [Part(root(4.0) * weights[1]), Part(float(parity(4)))]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        one = pool.submit(int, tree.fromstring("<a>1</a>").text).result()
    return sum(part.score for part in parts) + one + np.float64(found is not None)


class Counts(Base):
    def __init__(self, step: float = 1.0) -> None:
        super().__init__()
        self.step = step

    def __call__(self, trajectory, **columns) -> float:
        return self.twice + self.step


def outer():
    step = 1.0

    def closure(trajectory):
        return step

    def free(trajectory):
        return root(9.0) if """
nine""" == "\\nnine" and """
        nine""" == "\\n        nine" else 0.0

    class Closed:
        def __call__(self, trajectory):
            return step

    return closure, free, Closed


closure, free, Closed = outer()
opened = open(__file__)


def opens(trajectory):
    return opened.read()


def undefined(trajectory):
    return nowhere


class Scorer:
    def method(self, trajectory):
        return 1.0

    @classmethod
    def of_class(cls, trajectory):
        return 1.0


CELL = "def in_a_cell(trajectory):\\n    return TABLE['weight'][0]\\n"
linecache.cache["<cell 1>"] = (len(CELL), None, CELL.splitlines(True), "<cell 1>")
exec(compile(CELL, "<cell 1>", "exec"))
exec("def without_source(trajectory):\\n    return 1.0")
shown = {}
objects = {"object": Counts(), "partial": functools.partial(free), "lambda": lambda trajectory: 1.0}
objects |= {"method": Scorer().method, "of_class": Scorer.of_class, "bare": vars(Scorer)["of_class"]}
for name, found in {**globals(), **objects}.items():
    if callable(found) or name == "bare":
        try:
            given = own_reward.write_out(found)
            shown[name] = [given.function, given.source]
        except TaskError as error:
            shown[name] = [str(error), ""]
json.dump(shown, sys.stdout)
'''


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Everything callable in the script: its function and source, or why it was refused."""
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT.replace("\\\\", "\\"))
    search = os.pathsep.join(map(str, (REPOSITORY, SUPPORT)))
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded(given: dict[str, list[str]], name: str, folder: Path) -> Any:
    """The reward, imported from the file that was made of it."""
    path = folder / "reward.py"
    path.write_text(given[name][1])
    return plugins.load(f"{path}:{given[name][0]}", "reward.function")


SAID = ScoredText(prompt="1+1=", completion="so: 2", finish="stop", num_tokens=5)


def test_a_function_brings_all_that_it_uses(given: dict[str, list[str]], tmp_path: Path) -> None:
    assert loaded(given, "everything", tmp_path)(SAID, answer="2") == 4.0 + 1.0 + 1.0 + 1.0
    source = given["everything"][1]
    assert "nowhere" not in source and "Counts" not in source, "nothing that it does not use"
    assert "from math import sqrt as root\n" in source and "import xml.etree.ElementTree as tree\n" in source


def test_a_class_brings_its_base_and_is_made_by_the_run(given: dict[str, list[str]], tmp_path: Path) -> None:
    assert loaded(given, "Counts", tmp_path)(step=0.5)(SAID) == 2.5


def test_a_function_of_a_function_and_one_of_a_cell_stand_alone(given: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "cell").mkdir()
    assert loaded(given, "free", tmp_path)(SAID) == 3.0
    assert loaded(given, "in_a_cell", tmp_path / "cell")(SAID) == 0.5


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "closure": "reward 'closure' cannot stand alone in a file: 'closure' is a closure over 'step'; write",
        "Closed": "'Closed' is a closure over 'step'",
        "opens": "it uses 'opened', a TextIOWrapper that only the script has",
        "undefined": "'nowhere' is not defined",
        "without_source": "the source of 'without_source' is no longer in <string>",
        "object": "Counts is neither a function nor a class: give the class",
        "partial": "partial is neither a function nor a class",
        "method": "'method' is a method: give a class with a `__call__`",
        "of_class": "'of_class' is a method",
        "bare": "'of_class' is a method",
        "lambda": "a lambda has no source that can stand alone: write it as a `def`",
    }.items(),
)
def test_a_reward_that_cannot_stand_alone_is_refused_in_a_sentence(
    given: dict[str, list[str]], name: str, reason: str
) -> None:
    assert reason in given[name][0] and given[name][1] == ""
    assert "\n" not in given[name][0]


def test_an_imported_reward_is_named_by_its_module_or_its_file() -> None:
    import several_rewards

    assert custom_reward.write_out(arithmetic.score).function == "streamppo.tasks.library.arithmetic:score"
    name = next(
        name for name, value in vars(several_rewards).items() if getattr(value, "__module__", "") == "several_rewards"
    )
    found = custom_reward.write_out(getattr(several_rewards, name))
    assert (found.function, found.source) == (f"{SUPPORT / 'several_rewards.py'}:{name}", "")
    assert FunctionScorer(function=found.function)
