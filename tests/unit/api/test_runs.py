"""A run in Python: metrics, checkpoints, archive and summary of its folder; curves in notebooks; a light import."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import MATH
from report_case import run_folder

import streamppo
from streamppo.api import notebook
from streamppo.config.sections import Config
from streamppo.errors import ConfigError, StreamppoError


@pytest.fixture
def run(math_config: Callable[..., Config], tmp_path: Path) -> streamppo.Run:
    return streamppo.open(run_folder(tmp_path / "run", math_config()))


def test_metrics_are_a_row_for_each_update_with_the_accuracy_where_there_is_one(run: streamppo.Run) -> None:
    rows = run.metrics
    assert [row["update"] for row in rows] == list(range(1, 25))
    assert all(isinstance(value, int | float) for row in rows for value in row.values())
    assert all("entropy" in row and "reward" in row for row in rows)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"evaluation": 24, "wall_s": 1, "accuracy": 0.75, "count": 4, "failed": 0, "versions": [24, 24]}\n')
        file.write('{"remade": 25, "wall_s": 1, "reward": 0.5, "tokens_trained": 1, "tokens_too_old": 0,')
        file.write(' "lag_histogram": {}}\n')
    rows = run.metrics
    assert rows[23]["accuracy"] == 0.75
    assert rows[24] == {"update": 25, "wall_s": 1.0, "reward": 0.5, "tokens_trained": 1.0, "tokens_too_old": 0.0}


@pytest.mark.parametrize("call", ["run", "resume", "fork", "bisect", "replay"])
def test_overrides_that_are_one_text_are_refused_in_one_sentence(call: str, run: streamppo.Run) -> None:
    text: Any = "learner.lr=3e-4"
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: streamppo.run(MATH, text),
        "resume": lambda: streamppo.resume(run.folder, text),
        "fork": lambda: streamppo.fork(run.folder, 3, text),
        "bisect": lambda: streamppo.bisect(run.folder, "reward", above=0.5, changes=text),
        "replay": lambda: streamppo.replay(run.folder / "bundle", changes=text),
    }
    with pytest.raises(ConfigError, match=re.escape("overrides are a list of texts, ['learner.lr=3e-4']")):
        calls[call]()


def test_without_pandas_a_sentence_names_the_list(run: streamppo.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(StreamppoError, match="needs pandas: `pip install pandas`; Run"):
        run.dataframe()


def test_a_dataframe_has_a_row_for_each_update(run: streamppo.Run) -> None:
    pytest.importorskip("pandas")
    frame = run.dataframe()
    assert list(frame.index) == list(range(1, 25))
    assert list(frame["reward"]) == [row["reward"] for row in run.metrics]


def test_archive_checkpoints_configuration_and_summary_are_those_of_the_folder(run: streamppo.Run) -> None:
    assert run.archive.versions() == list(range(24))
    assert run.archive.table(3).num_rows == 4
    assert run.checkpoints == {}
    for version, has_manifest in (("00000008", True), ("00000016", True), ("00000020", False)):
        (run.folder / "checkpoints" / version).mkdir(parents=True)
        if has_manifest:
            (run.folder / "checkpoints" / version / "manifest.json").touch()
    assert run.checkpoints == {number: run.folder / "checkpoints" / f"{number:08d}" for number in (8, 16)}
    assert run.config.queue.batch_size == 4
    assert run.summary["updates"] == 24
    assert not run.is_running


def test_the_package_alone_imports_nothing_of_ours_and_its_functions_nothing_heavy() -> None:
    script = (
        "import sys, streamppo\n"
        "ours = [name for name in sys.modules if name.startswith('streamppo.')]\n"
        "streamppo.run, streamppo.open, streamppo.resume, streamppo.Run\n"
        "heavy = {'torch', 'ray', 'transformers', 'zarr', 'pandas', 'pyarrow', 'IPython'} & set(sys.modules)\n"
        "sys.exit(repr((ours, heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "([], set())"


def test_a_name_that_the_package_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = streamppo.nothing  # pyright: ignore[reportAttributeAccessIssue]


# --- notebooks -----------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that a notebook shows: new outputs and updated ones."""
    shown: list[str] = []

    def display(html: str, *, display_id: bool) -> Any:
        assert display_id
        shown.append(f"new {html}")
        return SimpleNamespace(update=lambda html: shown.append(f"again {html}"))

    ipython, inner = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=None)
    vars(inner).update(display=display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return shown


def test_a_notebook_draws_the_curves_again_in_their_place_when_there_is_something_new(
    run: streamppo.Run, drawn: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "DRAW_S", 0.0)
    watch = notebook.watcher()
    assert watch is not None
    watch(run.folder)
    watch(run.folder)
    assert [text.partition("<")[0] for text in drawn] == ["new "]
    lines = (run.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_bytes(b"".join(lines[:-3]))
    watch(run.folder)
    assert [text.partition("<")[0] for text in drawn] == ["new ", "again "]
    assert drawn[0].count("&lt;polyline") > 5 and "Held-out accuracy" in drawn[0]


def test_outside_a_notebook_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook.watcher() is None
    terminal = ModuleType("IPython")
    vars(terminal)["get_ipython"] = SimpleNamespace
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert notebook.watcher() is None


def test_a_run_shows_its_curves_as_html_that_keeps_its_style_to_itself(run: streamppo.Run) -> None:
    html = run._repr_html_()
    assert html.startswith("<div><iframe srcdoc=") and "<svg" not in html and "&lt;svg" in html


def test_windows_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="does not run on Windows: install it in WSL 2"):
        importlib.reload(streamppo)
