"""Code that the configuration of a stranger's run names runs only with consent; one's own run asks nothing."""

import ast
import importlib
import inspect
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec
import pytest
from conftest import MATH, REPOSITORY
from msgspec import structs
from report_case import run_folder

from streamppo import cli, loop
from streamppo.api import child
from streamppo.api.messages import RunRequest
from streamppo.commands import run_argument
from streamppo.commands.checks import check
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.reward import FunctionScorer, Reward, Scorer, ServiceScorer
from streamppo.config.rollout import Rollout
from streamppo.config.sections import Config
from streamppo.errors import ConfigError
from streamppo.queue.store.journal import Journal
from streamppo.tasks import plugins

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


@pytest.mark.parametrize("command", ["resume", "eval", "replay", "fork --at 1", "bisect --metric reward --above 0"])
def test_a_strangers_code_is_named_and_not_run(
    foreign: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    assert cli.main([name, str(foreign), *options]) == 2
    told = capsys.readouterr().err
    assert "reward.py:score" in told and "--trust" in told
    assert not (tmp_path / "ran").exists()


def test_trust_is_given_once_also_for_a_copy_and_not_for_other_code(foreign: Path, tmp_path: Path) -> None:
    config = configfile.load(foreign / configfile.CONFIG)
    consent.require(foreign, [config], trust=True)
    consent.require(foreign, [config])
    copy = shutil.copytree(foreign, tmp_path / "elsewhere" / "copy")
    copied = configfile.load(copy / configfile.CONFIG)
    consent.require(copy, [copied])
    (copy / "reward.py").write_text("def score(**_):\n    return 1.0\n")
    with pytest.raises(ConfigError, match="--trust"):
        consent.require(copy, [copied])


def test_a_run_that_is_made_here_asks_nothing(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    config = math_config("reward.function=rewards:score")
    folder = loop.new_folder(config, tmp_path / "runs")
    consent.require(folder, [config])
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(ConfigError, match="rewards:score"):
        consent.require(folder, [config])


def test_a_run_that_is_made_here_asks_nothing_after_its_code_beside_it_was_deleted(
    tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    code, runs = tmp_path / "runs" / "rewards.py", tmp_path / "runs"
    runs.mkdir()
    code.touch()
    folder = loop.new_folder(math_config(f"reward.function={code}:score"), runs)
    code.unlink()
    stored = configfile.load(folder / configfile.CONFIG)
    assert consent.code(stored) == {f"{code}:score"}
    consent.require(folder, [stored])


@pytest.fixture
def project(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    """A project with a run and, outside the run's folder, its reward and its agent."""
    project = tmp_path / "a project"
    (project / "lib").mkdir(parents=True)
    for name in ("lib/rewards.py", "agent.py"):
        (project / name).write_text("# the first")
    command = f"environment.command=['python', '{project}/agent.py', '--fast']"
    loop.new_folder(
        math_config(f"reward.function={project}/lib/rewards.py:score", command, "environment.max_turns=2"),
        project / "runs",
    )
    return project


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("name", ["lib/rewards.py", "agent.py"])
def test_a_project_that_moves_with_its_code_asks_only_for_changed_code(
    name: str, copies: bool, project: Path, tmp_path: Path
) -> None:
    (project / name).write_text("# changed where it was agreed to")
    run_argument.ask(project / "runs" / "math")
    config = configfile.load(project / "runs" / "math" / configfile.CONFIG)
    consent.give(project / "runs" / "math", config)
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(project, moved) if copies else shutil.move(project, moved)
    run_argument.ask(moved / "runs" / "math")
    (moved / name).write_text("# changed after the move")
    with pytest.raises(ConfigError, match=re.escape(f"{moved / name}")):
        run_argument.ask(moved / "runs" / "math")


def test_a_large_file_of_a_command_is_agreed_to_by_its_path(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    (tmp_path / "model.bin").touch()
    os.truncate(tmp_path / "model.bin", consent.MOST_CODE + 1)
    config = math_config(f"environment.command=['serve', '{tmp_path}/model.bin']", "environment.max_turns=2")
    consent.require(loop.new_folder(config, tmp_path / "runs"), [config])


def test_code_that_the_user_types_needs_no_consent(project: Path) -> None:
    run = project / "runs" / "math"
    with closing(Journal(run / "journal.sqlite")) as journal:
        journal.configure(0, msgspec.msgpack.encode(configfile.load(run / configfile.CONFIG)))
    (project / "lib" / "rewards.py").rename(project / "rewards.py")
    config = configfile.load(run / configfile.CONFIG, [f"reward.function={project}/rewards.py:score"])
    run_argument.agree_to_changes(run, config)
    (run / consent.FILE).unlink()
    with pytest.raises(ConfigError, match=r"lib/rewards\.py:score") as told:
        run_argument.ask(run, config)
    assert f"{project}/rewards.py" not in str(told.value)


def test_a_line_of_another_user_is_no_consent(
    tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = math_config("reward.function=rewards:score")
    folder = loop.new_folder(config, tmp_path / "runs")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    loop.new_folder(config, tmp_path / "runs")
    with pytest.raises(ConfigError, match="rewards:score"):
        consent.require(folder, [config])
    monkeypatch.setenv(consent.VARIABLE, "1")
    consent.require(folder, [config])


def test_without_a_place_for_the_secret_a_run_is_made_and_says_so(
    tmp_path: Path, math_config: Callable[..., Config], logged: pytest.LogCaptureFixture, state: Path
) -> None:
    state.write_text("no folder")
    config = math_config("reward.function=rewards:score")
    folder = loop.new_folder(config, tmp_path / "runs")
    assert logged.text.count("cannot be recorded") == 1
    consent.require(folder, [config], trust=True)


KEY = "the key in OPENAI_API_KEY for"
PLACES = {
    "FunctionScorer.function": ("reward.function=rewards:score", "rewards:score"),
    "FunctionScorer.arguments": (
        'reward={ function = "streamppo.tasks.scorers.code:CodeTests", arguments = { sandbox = "mine:Sandbox" } }',
        "mine:Sandbox",
    ),
    "Environment.name": ('environment={ name = "mine:Game" }', "mine:Game"),
    "Environment.arguments": (
        'environment={ name = "streamppo.tasks.library.calculator:Calculator", arguments = { environment = "evil" } }',
        "evil",
    ),
    "AgentEnvironment.agent": ('environment={ kind = "agent", agent = "mine:run" }', "mine:run"),
    "AgentEnvironment.command": (
        'environment={ kind = "agent", command = ["python", "my agent.py"] }',
        "python 'my agent.py'",
    ),
    "CustomSandbox.name": (
        'environment={ kind = "agent", command = ["x"], sandbox = { kind = "class", name = "streamppo.a:Box" } }',
        "streamppo.a:Box",
    ),
    "Rollout.limit": ("rollout.limit=limits:of", "limits:of"),
    "CustomAdvantage.function": ('algorithm.advantage={ kind = "function", function = "mine:a" }', "mine:a"),
    "CustomLoss.function": ('algorithm.policy_loss={ kind = "function", function = "mine:l" }', "mine:l"),
    "CustomCorrection.function": ('algorithm.correction={ kind = "function", function = "mine:c" }', "mine:c"),
    "VerifiersTask.environment": ('task={ kind = "verifiers", environment = "evil" }', "evil"),
    "SGLangEngine.args": (
        'rollout.engine={ kind = "sglang", args = { tool_server = "evil" } }',
        "rollout.engine.args.tool_server = evil",
    ),
    "Cluster.address": ("cluster.address=10.0.0.1:6379", "cluster.address = 10.0.0.1:6379"),
    "Remote.key_env": (
        'reward={ scorers = { x = { kind = "service", url = "http://evil", key_env = "OPENAI_API_KEY" } } }',
        f"reward.scorers.x: {KEY} http://evil",
    ),
    "Teacher.key_env": (
        'algorithm.teacher={ url = "http://evil", key_env = "OPENAI_API_KEY" }',
        f"algorithm.teacher: {KEY} http://evil",
    ),
    "SGLangEngine.api_key_env": (
        'rollout={ engine = { kind = "sglang", urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"], '
        'api_key_env = "OPENAI_API_KEY" }, actors = 2 }',
        f"rollout.engine: {KEY} http://127.0.0.1:1, http://127.0.0.1:2",
    ),
}
"""By field of the configuration: an override that names code there, or an address for a key, and its name."""


@pytest.mark.parametrize("field", PLACES)
def test_every_place_that_names_code_or_a_key_is_asked_for(field: str, math_config: Callable[..., Config]) -> None:
    override, name = PLACES[field]
    # The sandbox is that of a command, which is asked for too.
    assert consent.code(math_config(override)) - {"x"} == {name}


def test_no_field_that_names_code_or_a_key_is_forgotten() -> None:
    fields = set[str]()
    for file in (REPOSITORY / "streamppo" / "config").glob("*.py"):
        for made in (one for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef)):
            fields |= {f"{made.name}.{name}" for name, words in _documented(made) if _is_place(name, words)}
    assert fields <= PLACES.keys() and len(fields) > 6


def _documented(made: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The fields of a struct, and the words under each."""
    for field, below in zip(made.body, made.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            yield ast.unparse(field.target), ast.unparse(below)


def _is_place(name: str, words: str) -> bool:
    return "package.module" in words or name == "function" or name.endswith("key_env")


@pytest.mark.parametrize("name", ["streamppo.tasks.plugins:load", "streamppo.tasks.scorers.sandbox:Local"])
def test_names_of_streamppo_that_run_what_they_are_given_are_asked_for(
    name: str, math_config: Callable[..., Config]
) -> None:
    assert consent.code(math_config(f"reward.function={name}")) == {name}


def test_a_key_for_another_address_is_asked_for_again(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    def of(url: str) -> Config:
        scorers: dict[str, Scorer] = {"x": ServiceScorer(url=url, key_env="OPENAI_API_KEY")}
        return structs.replace(math_config(), reward=Reward(scorers))

    folder = loop.new_folder(of("http://mine"), tmp_path / "runs")
    consent.require(folder, [of("http://mine")])
    with pytest.raises(ConfigError, match="OPENAI_API_KEY for http://evil"):
        consent.require(folder, [of("http://evil")])


@pytest.mark.parametrize("address", ["local", "auto"])
def test_what_is_built_in_needs_no_consent(address: str, math_config: Callable[..., Config]) -> None:
    assert not consent.code(math_config(f"cluster.address={address}"))


@pytest.mark.parametrize("name", sorted(consent.BUILT_IN))
def test_a_name_that_is_built_in_is_there(name: str) -> None:
    assert plugins.load(name, "test")


def test_every_scorer_of_streamppo_is_built_in() -> None:
    modules = [
        importlib.import_module(f"streamppo.tasks.scorers.{name}") for name in ("maths", "format_reward", "code")
    ]
    scorers = {
        f"{module.__name__}:{name}"
        for module in modules
        for name, one in vars(module).items()
        if one.__class__ in (type, FunctionType) and one.__module__ == module.__name__
        if "trajectory" in inspect.signature(vars(one).get("__call__", one)).parameters
    }
    assert len(scorers) >= 7 and scorers <= consent.BUILT_IN


def test_a_run_that_was_moved_with_its_own_reward_asks_nothing(foreign: Path, tmp_path: Path) -> None:
    config = configfile.load(foreign / configfile.CONFIG)
    with closing(Journal(foreign / "journal.sqlite")) as journal:
        journal.configure(0, msgspec.msgpack.encode(config))
    consent.give(foreign, config)
    moved = foreign.rename(tmp_path / "elsewhere")
    run_argument.ask(moved)
    (moved / "reward.py").write_text("def score(**_):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"reward\.py:score"):
        run_argument.ask(moved)


def test_code_that_updates_of_the_past_are_made_again_with_is_asked_for(
    tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    folder = run_folder(tmp_path / "math", math_config(), updates=2)
    loss = 'algorithm.policy_loss={ kind = "function", function = "evil:loss" }'
    with closing(Journal(folder / "journal.sqlite")) as journal:
        journal.configure(0, msgspec.msgpack.encode(math_config(loss)))
    with pytest.raises(ConfigError, match="evil:loss"):
        run_argument.ask(folder)


def test_a_script_that_goes_on_with_a_strangers_run_is_refused_too(foreign: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConfigError, match="--trust"):
        child._resume(RunRequest(folder=str(foreign)), theirs)  # pyright: ignore[reportPrivateUsage]
    assert not (tmp_path / "ran").exists()


def test_run_with_resume_names_an_option_that_it_takes(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = list[Any]()
    monkeypatch.setattr(loop, "run", lambda config, *_, **__: begun.append(config) or 0)
    monkeypatch.setattr(check, "refuse", lambda _: None)
    arguments = ["run", str(MATH), "--resume", "--runs", str(foreign.parent)]
    assert cli.main(arguments) == 2
    assert "--trust" in capsys.readouterr().err and not begun
    assert cli.main([*arguments, "--trust"]) == 0
    assert len(begun) == 1


@pytest.mark.parametrize("command", ["summary", "inspect", "report", "trace", "export"])
def test_commands_that_run_nothing_of_a_run_need_no_consent(
    foreign: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["--to", str(tmp_path / "to")] if command in ("export", "trace") else []
    cli.main([command, str(foreign), *to])
    assert "--trust" not in capsys.readouterr().err
    assert not (tmp_path / "ran").exists() and not (foreign / consent.FILE).exists()


@pytest.mark.parametrize("name", ["a\0b.py:score", "\ud800.py:score", f"{'x' * 5000}.py:score", "RUN/large.py:score"])
def test_a_name_that_cannot_be_a_file_is_asked_for(
    name: str, tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(2**40)
    named = name.replace("RUN", str(tmp_path))
    config = structs.replace(math_config(), rollout=Rollout(limit=named))
    consent.give(tmp_path, config)
    with pytest.raises(ConfigError) as told:
        consent.require(tmp_path, [config]) if "large" in name else consent.require(tmp_path / "other", [config])
    assert len(str(told.value)) < 1000


def test_the_lines_of_a_consent_are_read_to_a_bound(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    with (tmp_path / consent.FILE).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="--trust"):
        consent.require(tmp_path, [math_config("reward.function=rewards:score")])
    (tmp_path / consent.FILE).unlink()
    os.mkfifo(tmp_path / consent.FILE)
    with pytest.raises(ConfigError, match="--trust"):
        consent.require(tmp_path, [math_config("reward.function=rewards:score")])


def test_many_names_are_told_in_a_sentence(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    scorers: dict[str, Scorer] = {f"{number}": FunctionScorer(function=f"evil{number}:score") for number in range(50)}
    config = structs.replace(math_config(), reward=Reward(scorers))
    with pytest.raises(ConfigError, match=r"'evil0:score'.* and 40 more: read") as told:
        consent.require(tmp_path, [config])
    assert len(str(told.value)) < 1000
