"""Functions that users bring to an update are told of by file and line."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamppo.errors import RunError, TaskError
from streamppo.tasks import plugins


def test_a_function_that_fails_when_it_is_tried_is_told_with_its_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(inputs):\n    raise KeyError('advantage')\n")

    def try_it(function: Callable[..., object]) -> None:
        function(None)

    with pytest.raises(TaskError, match=r"^algorithm\.policy_loss\.function .*mine\.py:2: KeyError: 'advantage'"):
        plugins.load_and_try(f"{file}:loss", "algorithm.policy_loss.function", try_it)


@pytest.mark.parametrize("name", ["random.py", "queue/__init__.py", "msgspec.py"])
def test_a_file_of_the_current_folder_that_hides_a_module_of_python_or_ray_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "of_this_folder.py").write_text("def score(trajectory):\n    return 1.0\n")
    plugins.export_path()
    assert callable(plugins.load("of_this_folder:score", "reward.function"))
    # A checkout, beside an installed streamppo that is in use.
    (tmp_path / "streamppo").mkdir()
    (tmp_path / "streamppo" / "__init__.py").touch()
    monkeypatch.setitem(sys.modules, "streamppo", SimpleNamespace(__file__="/lib/site-packages/streamppo/__init__.py"))
    plugins.export_path()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    monkeypatch.setenv("PYTHONPATH", "")
    hiding = path if path.parent == tmp_path else path.parent
    with pytest.raises(
        RunError, match=rf"^{hiding} hides the module '{hiding.stem}'.*: rename it, or start in another"
    ):
        plugins.export_path()
    assert not os.environ["PYTHONPATH"]


def test_code_of_a_users_file_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def score(trajectory): ...\n")
    score = plugins.load(f"{tmp_path}/mine.py:score", "reward.function")
    assert score is plugins.load(f"{tmp_path}/mine.py:score", "reward.function")
    assert not plugins.is_ours(score) and plugins.is_ours(plugins.load("streamppo.tasks.scorers.maths:gsm8k", "x"))
