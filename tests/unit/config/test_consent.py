"""Code that the configuration of a stranger's run names runs only with consent; one's own run asks nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from report_case import run_folder

from streamppo import cli, loop
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import ConfigError

EVIL = "from pathlib import Path\nPath({!r}).touch()\ndef score(**_):\n    return 0.0\n"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def foreign(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    """A run whose reward lies in its folder and leaves a file behind when it is imported."""
    folder = tmp_path / "runs" / "math"
    folder.parent.mkdir()
    run_folder(folder, math_config(), updates=2)
    reward = folder / "reward.py"
    reward.write_text(EVIL.format(str(tmp_path / "ran")))
    configfile.save(math_config(f"reward.function={reward}:score"), folder)
    return folder


@pytest.mark.parametrize("command", ["resume", "eval", "replay"])
def test_a_strangers_code_is_named_and_not_run(
    foreign: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(foreign)]) == 2
    told = capsys.readouterr().err
    assert "reward.py:score" in told and "--trust" in told
    assert not (tmp_path / "ran").exists()


def test_trust_is_given_once_also_for_a_copy_and_not_for_other_code(foreign: Path, tmp_path: Path) -> None:
    config = configfile.load(foreign / configfile.CONFIG)
    consent.ask(foreign, [config], trust=True)
    consent.ask(foreign, [config])
    copy = shutil.copytree(foreign, tmp_path / "elsewhere" / "copy")
    copied = configfile.load(copy / configfile.CONFIG)
    consent.ask(copy, [copied])
    (copy / "reward.py").write_text("def score(**_):\n    return 1.0\n")
    with pytest.raises(ConfigError, match="--trust"):
        consent.ask(copy, [copied])


def test_a_run_that_is_made_here_asks_nothing(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    config = math_config("reward.function=rewards:score")
    folder = loop.new_folder(config, tmp_path / "runs")
    consent.ask(folder, [config])
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(ConfigError, match="rewards:score"):
        consent.ask(folder, [config])


def test_a_line_of_another_user_is_no_consent(
    tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = math_config("reward.function=rewards:score")
    folder = loop.new_folder(config, tmp_path / "runs")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    loop.new_folder(config, tmp_path / "runs")
    with pytest.raises(ConfigError, match="rewards:score"):
        consent.ask(folder, [config])
    monkeypatch.setenv(consent.VARIABLE, "1")
    consent.ask(folder, [config])


def test_without_a_place_for_the_secret_a_run_is_made_and_says_so(
    tmp_path: Path, math_config: Callable[..., Config], logged: pytest.LogCaptureFixture, state: Path
) -> None:
    state.write_text("no folder")
    config = math_config("reward.function=rewards:score")
    folder = loop.new_folder(config, tmp_path / "runs")
    assert logged.text.count("cannot be recorded") == 1
    consent.ask(folder, [config], trust=True)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.limit=limits:of",
        "reward.function=streamppo.tasks.plugins:load",
        "reward.function=streamppo.tasks.scorers.sandbox:Local",
        'reward={ function = "streamppo.tasks.scorers.code:CodeTests", arguments = { sandbox = "mine:Sandbox" } }',
        'algorithm.policy_loss={ kind = "function", function = "losses:mine" }',
        "cluster.address=10.0.0.1:6379",
        'task={ kind = "verifiers", environment = "evil" }',
    ],
)
def test_every_place_that_names_code_is_asked_for(override: str, math_config: Callable[..., Config]) -> None:
    assert len(consent.code(math_config(override))) == 1


def test_what_is_built_in_needs_no_consent(math_config: Callable[..., Config]) -> None:
    assert not consent.code(math_config())
