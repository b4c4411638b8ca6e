"""The `[environment]` of an agent: its kind, its paths, and the settings that it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MATH

from streamppo.config import file as configfile
from streamppo.config.sections import Config, describe_limits
from streamppo.config.task import AgentEnvironment, BubblewrapSandbox, Environment
from streamppo.errors import ConfigError

AGENT = 'environment={ kind = "agent", agent = "mine.py:run" }'


def test_an_environment_without_a_kind_is_a_class_or_an_agent_by_its_fields(
    math_config: Callable[..., Config],
) -> None:
    assert isinstance(math_config("environment.name=a:B").environment, Environment)
    for field in ('agent="a:b"', 'command=["x"]'):
        assert isinstance(math_config(f"environment.{field}").environment, AgentEnvironment)
    assert isinstance(math_config(AGENT).environment, AgentEnvironment)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("environment.kind=agent", "an agent is a function, agent = "),
        ('environment={ agent = "a:b", command = ["x"] }', "give one of them"),
        ('environment={ kind = "agent", agent = "a:b", name = "c:D" }', "name"),
        ('environment={ agent = "a:b", sandbox = "bubblewrap" }', "sandbox is for a program: give command"),
        ('environment={ command = ["x"], sandbox = "docker" }', "kinds are bubblewrap, class"),
        ('environment={ kind = "agnt", agent = "a:b" }', "kinds are class, agent"),
    ],
)
def test_an_agent_is_one_function_or_one_program(
    override: str, sentence: str, math_config: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        math_config(override)


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (("queue.segments={}",), "queue.segments"),
        (('queue.segments={ prefix = "detached" }',), "queue.segments"),
        (("learner.ranks=2", "learner.mesh.context=2"), "learner.mesh.context = 2"),
        (("learner.ranks=2", "learner.mesh.tensor=2"), "learner.mesh.tensor = 2"),
    ],
)
def test_choices_that_take_no_branches_are_refused_by_name(
    choice: tuple[str, ...], name: str, math_config: Callable[..., Config]
) -> None:
    # They are possible with an environment of a class.
    math_config("environment.name=a:B", *choice)
    with pytest.raises(ConfigError, match=rf"{name} does not support branches, which an agent's run may have"):
        math_config(AGENT, *choice)


def test_the_agents_files_are_looked_for_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("mine.py", "agent.sh"):
        (tmp_path / "project" / name).touch()
    for given, field, wanted in (
        ('agent = "mine.py:run"', "agent", f"{tmp_path / 'project' / 'mine.py'}:run"),
        (
            'command = ["sh"]\nsandbox = { kind = "bubblewrap", files = ["agent.sh", "nowhere"] }',
            "sandbox",
            BubblewrapSandbox(files=(str(tmp_path / "project" / "agent.sh"), "nowhere")),
        ),
        ('command = ["sh", "agent.sh", "-x"]', "command", ("sh", str(tmp_path / "project" / "agent.sh"), "-x")),
    ):
        text = MATH.read_text() + f'\n[environment]\nkind = "agent"\n{given}\n'
        (tmp_path / "project" / "own.toml").write_text(text)
        config = configfile.load(tmp_path / "project" / "own.toml")
        assert getattr(config.environment, field) == wanted


@pytest.mark.parametrize(
    ("environment", "limits"),
    [
        ((), "rollout.max_tokens (5)"),
        (
            ("environment.name=mine:Guess",),
            "rollout.max_tokens (5) for a turn or environment.max_tokens (4096) for all turns",
        ),
        (
            ("environment.agent=mine:run", "environment.max_tokens=90"),
            "rollout.max_tokens (5) for a turn or environment.max_tokens (90) for all turns or the agent's own limit",
        ),
    ],
    ids=["completion", "turns", "agent"],
)
def test_the_limits_that_may_cut_a_completion_off_are_named(
    math_config: Callable[..., Config], environment: tuple[str, ...], limits: str
) -> None:
    assert describe_limits(math_config(*environment)) == limits
