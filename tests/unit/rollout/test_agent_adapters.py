"""The agents of examples/ for other frameworks, each against the real library where it is installed. The policy is
scripted: its text is a function of its context.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import agent_case
import pytest
from agent_case import Speaks
from conftest import REPOSITORY

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import Player
from streamppo.tasks import plugins, task
from streamppo.tasks.scorers import bubblewrap
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

LIBRARIES = {
    "gym_tries": "reasoning_gym",
    "mcp_tools": "mcp",
    "openenv_sums": "openenv",
    "verifiers_guess": "verifiers",
}
"""The library of each example."""


def needs(example: str) -> pytest.MarkDecorator:
    library = LIBRARIES[example]
    # Version 1, which verifiers and OpenEnv bring, has another interface.
    lacks = find_spec(library) is None or (library == "mcp" and metadata.version("mcp").startswith("1."))
    return pytest.mark.skipif(lacks, reason=f"{library} is not installed")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def example(name: str, *overrides: str) -> Config:
    return configfile.load(REPOSITORY / "examples" / f"{name}.toml", overrides)


def play(
    config: Config, prompt: Prompt, tokenizer: Tokenizer, say: Callable[[str], str], times: int = 1
) -> list[Episode]:
    assert config.environment is not None

    async def main() -> list[Episode]:
        scored = bool(config.reward.scorers)
        player = Player(Speaks(tokenizer, say), tokenizer, config.environment, scored=scored)  # pyright: ignore
        try:
            return await asyncio.gather(*(player.play(prompt, Sampling(200)) for _ in range(times)))
        finally:
            assert player.agents is not None
            await player.agents.close()

    return asyncio.run(main())


def sampled(episode: Episode, tokenizer: Tokenizer) -> str:
    """All that the policy said, once."""
    return tokenizer.spell(episode.tokens[episode.mask].tolist())


def whole(episode: Episode, tokenizer: Tokenizer) -> str:
    return tokenizer.spell([*episode.prompt_tokens.tolist(), *episode.tokens.tolist()])


# --- reasoning-gym -------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("gym_tries")
@pytest.mark.parametrize(("right_at", "reward"), [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, None)])
def test_a_problem_of_reasoning_gym_is_asked_again_until_it_is_solved(
    right_at: int, reward: float | None, tokenizer: Tokenizer
) -> None:
    config = example("gym_tries", "task.size=40")
    prompt = task.build(config.task, 1).training[0]
    answer = prompt.columns["answer"]

    def say(text: str) -> str:
        return answer if text.count("[user]") == right_at else "no number"

    (episode,) = play(config, prompt, tokenizer, say)
    tries = min(right_at, 3)
    assert whole(episode, tokenizer).count(prompt.text) == tries and not episode.branches
    assert sampled(episode, tokenizer).count("no number<eos>") == tries - (reward is not None)
    found = sum(episode.turn_rewards)
    # A data set gives an answer that is wrong, but one, a little.
    assert found == pytest.approx(reward) if reward is not None else 0.0 <= found < 0.1
    assert episode.end.components == {"solved": float(reward is not None), "first": float(right_at == 1)}


@pytest.mark.slow
@needs("gym_tries")
def test_a_problem_whose_run_has_spent_its_tokens_is_cut_off_and_scored(tokenizer: Tokenizer) -> None:
    config = example("gym_tries", "task.size=40", "environment.max_tokens=40")
    (episode,) = play(config, task.build(config.task, 1).training[0], tokenizer, lambda _: "no number")
    assert (len(episode.turns), episode.finish) == (1, "length")


# --- tools of an MCP server ----------------------------------------------------------------------------------


CALLS = {
    "right": '{"name": "add", "arguments": {"first": 1, "second": 2}}',
    "no tool of it": '{"name": "divide", "arguments": {}}',
    "not its arguments": '{"name": "add", "arguments": {"first": "one"}}',
    "no json": '{"name": "add", "arguments": "{"}',
}


@pytest.mark.slow
@needs("mcp_tools")
@pytest.mark.parametrize("kind", CALLS)
def test_the_tools_of_an_mcp_server_are_shown_and_called(kind: str, tokenizer: Tokenizer) -> None:
    def say(text: str) -> str:
        return "the sum is 3" if "[tool]" in text else f"<tool_call>{CALLS[kind]}</tool_call>"

    (episode,) = play(example("mcp_tools"), Prompt(text="1+2=", columns={"answer": "3"}), tokenizer, say)
    text = whole(episode, tokenizer)
    assert text.startswith("[tools]add <eos>[user]1+2=<eos>[assistant]<tool_call>")
    told = text.split("[tool]")[1].split("<eos>")[0]
    assert told == "3" if kind == "right" else told.lower().startswith(("error", "unknown tool"))
    assert episode.turn_rewards == (0.0, 1.0) and episode.end.components == {"calls": 1.0} and not episode.branches


@pytest.mark.slow
@needs("mcp_tools")
def test_a_run_of_an_mcp_agent_that_has_spent_its_requests_is_cut_off_and_scored(tokenizer: Tokenizer) -> None:
    call = f"<tool_call>{CALLS['right']}</tool_call>"
    prompt = Prompt(text="1+2=", columns={"answer": "3"})
    (episode,) = play(example("mcp_tools"), prompt, tokenizer, lambda _: call)
    assert (len(episode.turns), episode.finish, sum(episode.turn_rewards)) == (4, "length", 0.0)


# --- OpenEnv -------------------------------------------------------------------------------------------------


@needs("openenv_sums")
def test_an_openenv_environment_answers_each_turn_and_gives_its_reward(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{port}")
    server = subprocess.Popen([sys.executable, "examples/openenv_sums.py"], env={**os.environ, "PYTHONPATH": "."})
    try:
        wait_for(port)

        def say(text: str) -> str:
            return "46" if text.count("[user]") == 2 else "47"

        prompt = Prompt(text="12+34=", columns={"answer": "46"})
        for episode in play(example("openenv_sums", "environment.max_tokens=200"), prompt, tokenizer, say, times=4):
            assert whole(episode, tokenizer) == (
                "[user]12+34=<eos>[assistant]47<eos>[user]12+34=<eos>[assistant]46<eos>"
            )
            assert (sum(episode.turn_rewards), episode.end.components) == (0.5, {"first": 0.0})
        (episode,) = play(example("openenv_sums"), prompt, tokenizer, say)
        assert (len(episode.turns), episode.finish, sum(episode.turn_rewards)) == (1, "length", 0.0)
    finally:
        server.kill()
        server.wait()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- verifiers -----------------------------------------------------------------------------------------------


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "examples"))
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    return example("verifiers_guess")


@needs("verifiers_guess")
@pytest.mark.parametrize(
    ("beside", "reward"), [((0,), 1.0), ((-1, 0), 1.0), ((-1, -1), 0.0), ((1, 0), 1.0)], ids=lambda one: f"{one}"
)
def test_an_environment_of_verifiers_plays_its_episode_at_the_endpoint(
    beside: tuple[int, ...], reward: float, guesses: Config, tokenizer: Tokenizer
) -> None:
    built = task.build(guesses.task, 1)
    assert len(built.training) == 8 and not {one.text for one in built.training} & {
        one.text for one in built.held_out(None)
    }
    prompt = next(one for one in built.training if one.columns["answer"] not in "09")
    said = [str(int(prompt.columns["answer"]) + one) for one in beside]
    (episode,) = play(guesses, prompt, tokenizer, lambda text: said[text.count("[assistant]") - 1])
    assert sampled(episode, tokenizer) == "".join(f"{one}<eos>" for one in said) and not episode.branches
    hint = f"<eos>[user]{'more' if beside[0] < 0 else 'less'}<eos>[assistant]" if beside[0] else ""
    assert whole(episode, tokenizer).startswith(f"[user]{prompt.text}<eos>[assistant]{said[0]}{hint}")
    assert sum(episode.turn_rewards) == reward
    assert episode.end.components == {"found": reward, "tries": float(len(said))}


@needs("verifiers_guess")
def test_an_episode_of_verifiers_that_spends_its_requests_is_scored(guesses: Config, tokenizer: Tokenizer) -> None:
    config = configfile.change(guesses, ["environment.max_turns=1"])
    (episode,) = play(config, task.build(guesses.task, 1).training[0], tokenizer, lambda _: "?")
    assert (len(episode.turns), episode.finish, sum(episode.turn_rewards)) == (1, "length", 0.0)


@needs("verifiers_guess")
def test_an_episode_of_verifiers_that_fails_says_why(guesses: Config, tokenizer: Tokenizer) -> None:
    prompt = task.build(guesses.task, 1).training[0]
    unasked = {**json.loads(prompt.columns["row"]), "prompt": None}
    for row, said in (("{}", "Field required"), (json.dumps(unasked), "the verifiers episode failed: .*bare turn")):
        broken = Prompt(text=prompt.text, columns={**prompt.columns, "row": row})
        with pytest.raises(EnvironmentFailed, match=said):
            play(guesses, broken, tokenizer, lambda _: "7")


@needs("verifiers_guess")
def test_an_environment_of_verifiers_may_be_named_by_a_file_of_its_own_commands(
    guesses: Config, tmp_path: Path
) -> None:
    (tmp_path / "guess.toml").write_text(
        '[env.taskset]\nid = "verifiers_guess"\n[env.solver]\nmax_turns = 3\nruntime = { type = "subprocess" }\n'
    )
    config = configfile.change(guesses, [f"task.environment={tmp_path / 'guess.toml'}"])
    assert len(task.build(config.task, 1).training) > 0
    missing = configfile.change(guesses, ["task.environment=nowhere_v1"])
    with pytest.raises(TaskError, match="verifiers cannot load the environment 'nowhere_v1'"):
        task.build(missing.task, 1)


TWO_SEATS = """
import verifiers.v1 as vf
from verifiers_guess import Asks, Numbers

__all__ = ["Asks", "Numbers", "Talk"]

class TalkConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig = vf.AgentConfig()

class Talk(vf.Env[TalkConfig]):
    async def setup(self, agents):
        agents.user.trainable = TRAINED

    async def run(self, task, agents):
        for seat in (agents.solver, agents.user):
            async with seat.interaction(task) as talk:
                await talk.turn()
"""


@needs("verifiers_guess")
@pytest.mark.parametrize(
    ("trained", "why"),
    [
        (False, r"the seat 'user' is not to be trained, and the policy plays it: .* as \[env.user.client\]"),
        (True, "the policy plays the seats solver, user, and one reward is for all its turns"),
    ],
)
def test_a_seat_that_the_policy_must_not_play_is_refused(
    guesses: Config, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, trained: bool, why: str
) -> None:
    name = f"two_seats_{trained}".lower()
    (tmp_path / f"{name}.py").write_text(TWO_SEATS.replace("TRAINED", str(trained)))
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY / 'examples'}:{tmp_path}")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configfile.change(guesses, [f"task.environment={name}"])
    with pytest.raises(EnvironmentFailed, match=why):
        play(config, task.build(config.task, 1).training[0], tokenizer, lambda _: "7")


# --- a program in a sandbox ----------------------------------------------------------------------------------


@pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "bubblewrap works")
def test_the_program_in_a_sandbox_answers_and_is_scored_by_others(tokenizer: Tokenizer) -> None:
    (episode,) = play(example("walled_agent"), Prompt(text="12+34=", columns={}), tokenizer, lambda _: "46")
    assert whole(episode, tokenizer) == "[user]12+34=<eos>[assistant]46<eos>" and episode.turn_rewards == (0.0,)


# --- an extra that is not installed --------------------------------------------------------------------------


REQUIREMENTS = [
    "torch>=2.9",
    "openai>=2.0; extra == 'agents'",
    "openai>=2.0; extra == 'test'",
    'mcp>=2.0; extra == "mcp"',
    "streamppo[agents]; extra == 'mcp'",
    "reasoning-gym>=0.1.20; extra == 'gym'",
    "prometheus-client>=0.20; extra == 'test'",
    "prometheus-client>=0.20; extra == 'tracking'",
    "triton>=3.5; sys_platform == 'linux' and extra == 'test'",
    "shared; extra == 'one'",
    "shared; extra == 'two'",
]


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        *[("openai", "agents"), ("mcp", "mcp"), ("reasoning_gym", "gym"), ("prometheus_client", "tracking")],
        *[("torch", ""), ("triton", ""), ("shared", ""), ("nobody", "")],
    ],
)
def test_the_extra_of_a_module_is_the_one_that_brings_it(module: str, extra: str) -> None:
    assert plugins.extra_of(module, REQUIREMENTS) == extra


@pytest.mark.parametrize("name", LIBRARIES)
def test_check_names_the_extra_that_an_agent_lacks(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = LIBRARIES[name]
    extra = {"reasoning_gym": "gym"}.get(library, library)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: [f"{library}; extra == '{extra}'"])
    loaded = [one for one in sys.modules if one.startswith(f"{library}.")]
    for module in (library, f"{library}.v1", *loaded):
        monkeypatch.setitem(sys.modules, module, None)
    copy = tmp_path / "copy.py"
    copy.write_text((REPOSITORY / "examples" / f"{name}.py").read_text())
    with pytest.raises(TaskError, match=rf"pip install 'streamppo\[{extra}\]'"):
        plugins.function(f"{copy}:run", "environment.agent")
