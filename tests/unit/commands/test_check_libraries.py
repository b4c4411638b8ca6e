"""A tracker without its library is refused before a run begins, with the extra that has it."""

import importlib.machinery

import pytest
from conftest import MATH

from streamppo.commands.checks import machine
from streamppo.config import file as configfile

ALL = ['telemetry.trackers=["tensorboard", "wandb", "trackio", "mlflow"]']
ENDPOINT = 'telemetry.prometheus={kind="endpoint", port=9464}'


def found(monkeypatch: pytest.MonkeyPatch, *modules: str) -> dict[str, tuple[str, str]]:
    """State and text of each kind where only `modules` are installed, and wandb/ is a folder of runs."""
    namespace = importlib.machinery.ModuleSpec("wandb", None)
    specs = {name: importlib.machinery.ModuleSpec(name, None, origin="file.py") for name in modules}
    monkeypatch.setattr(machine, "find_spec", ({"wandb": namespace} | specs).get)
    config = configfile.load(MATH, [*ALL, ENDPOINT])
    return {one.subject: (one.state, one.text) for one in machine.libraries(config)}


def test_a_library_that_is_there_is_ok_and_a_missing_one_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    here = found(monkeypatch, "tensorboard", "prometheus_client")
    states = {kind: state for kind, (state, _) in here.items()}
    wrong = dict.fromkeys(("wandb", "trackio", "mlflow"), "error")
    assert states == wrong | {"tensorboard": "ok", "prometheus": "ok"}
    assert "streamppo[tracking]" in here["wandb"][1] and "streamppo[trackio]" in here["trackio"][1]


def test_nothing_is_looked_for_where_nothing_is_asked_for() -> None:
    assert list(machine.libraries(configfile.load(MATH, ['telemetry.prometheus={kind="ray"}']))) == []


@pytest.mark.parametrize("there", [True, False])
def test_nixl_is_looked_for_where_weights_travel_by_it(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.machinery.ModuleSpec("nixl", None, origin="nixl/__init__.py")
    monkeypatch.setattr(machine, "find_spec", {"nixl": found if there else None}.get)
    assert list(machine.libraries(configfile.load(MATH, []))) == []
    (finding,) = machine.libraries(configfile.load(MATH, ["learner.transport={kind='nixl'}"]))
    assert (finding.subject, finding.state) == ("nixl", "ok" if there else "error")
    assert there or "pip install 'streamppo[nixl]'" in finding.text
