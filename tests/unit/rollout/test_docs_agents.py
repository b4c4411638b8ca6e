"""The agent of docs/agents.md runs as it stands there, and `check` plays one."""

import asyncio
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import agent_case
import pytest
from agent_case import Speaks
from conftest import REPOSITORY, SUPPORT

from streamppo.cli import main
from streamppo.commands.checks import turns
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import Player
from streamppo.tasks import task as tasks
from streamppo.types import Prompt

PAGE = (REPOSITORY / "docs" / "agents.md").read_text()
BLOCK = re.compile(r"^```(python|toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CALL = '<tool_call>{"name": "search", "arguments": {"word": "tide"}}</tool_call>'


def play_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], str]) -> tuple[Episode, str]:
    """Play the page's agent with a policy that says `say(context)`; return the episode and the text of its tokens."""
    (_, code), (_, table) = BLOCK.findall(PAGE)
    (tmp_path / "agents").mkdir()
    (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    monkeypatch.chdir(tmp_path)
    given = tomllib.loads(table)["environment"]
    config = AgentEnvironment(**{name: value for name, value in given.items() if name != "kind"})
    tokenizer = agent_case.tokenizer(tmp_path / "model")

    async def main() -> Episode:
        engine = Speaks(tokenizer, say)
        player = Player(engine, tokenizer, config)  # pyright: ignore
        assert player.agents is not None
        try:
            prompt = Prompt(text="How often?", columns={"answer": "twice"})
            return await player.play(prompt, Sampling(200))
        finally:
            await player.agents.close()

    episode = asyncio.run(main())
    return episode, tokenizer.spell([*episode.prompt_tokens.tolist(), *episode.tokens.tolist()])


@pytest.mark.slow
def test_the_agent_of_the_page_asks_calls_its_tool_and_is_rewarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(text: str) -> str:
        return "twice a day" if "[tool]" in text else CALL

    episode, whole = play_page(tmp_path, monkeypatch, say)
    assert episode.turn_rewards == (0.0, 1.0) and not episode.branches
    assert whole == (
        f"[tools]search <eos>[user]How often?<eos>[assistant]{CALL}<eos>"
        "[tool]The tide turns twice a day.<eos>[assistant]twice a day<eos>"
    )


@pytest.mark.slow
def test_the_agent_of_the_page_ends_with_a_reward_if_the_policy_never_stops_calling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode, _ = play_page(tmp_path, monkeypatch, lambda _: CALL)
    assert (len(episode.turns), sum(episode.turn_rewards), episode.finish) == (8, 0.0, "length")


FAILS = "with the row's answer to each request it fails: "
CHECKED = {
    "one_turn": ("ok", "it got 1 answer, and ended with reward 1"),
    "parallel": ("ok", "it got 3 answers in 3 branches, and ended with reward 7.5"),
    "until_refused": (
        "ok",
        "it got 3 answers in 3 branches, continued with 'user: 12+341', was cut off by max_turns or",
    ),
    "raises_when_refused": (
        "note",
        "refused at 3.0; an agent whose run is over its budget ends with a reward if it catches",
    ),
    "raises": ("note", FAILS + "the agent: agents_of_every_kind.py"),
    "gives_nothing": ("note", FAILS + "the agent gave no reward"),
    "never_calls": ("error", FAILS + "the agent made no request"),
    "dies": ("error", FAILS + "the agent: its process died: exit code 3"),
    "wants_a_column": ("error", FAILS + "the agent asks for the column 'colour'; columns are answer"),
    "hangs": ("note", "it has not ended after 0.5 s, and was stopped; in a run it has 600 s (environment.timeout_s)"),
    "hangs_without_awaiting": ("note", "it has not ended after 0.5 s, and was stopped; in a run it has 600 s"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("agent", CHECKED)
def test_check_plays_an_agent_with_the_rows_own_answer_and_stops_one_that_does_not_end(
    agent: str, math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "AGENT_S", 0.5 if agent.startswith("hangs") else 20.0)
    monkeypatch.setattr("streamppo.rollout.agents.GRACE_S", 0.2)
    config = math_config(
        f"environment.agent={SUPPORT / 'agents_of_every_kind.py'}:{agent}", "environment.max_turns=3", "reward={}"
    )
    tokenizer = agent_case.tokenizer(tmp_path)
    task = tasks.build(config.task, config.seed, tokenizer)
    (found,) = turns.findings(config, task, tokenizer)
    state, said = CHECKED[agent]
    assert (found.subject, found.state) == ("environment", state)
    assert said.replace("12+34", task.training[0].text) in found.text


def test_an_agent_that_hangs_as_long_as_a_run_lets_it_is_an_error(
    math_config: Callable[..., Config], tmp_path: Path
) -> None:
    hangs = f"environment.agent={SUPPORT / 'agents_of_every_kind.py'}:hangs"
    config, tokenizer = math_config(hangs, "environment.timeout_s=0.3", "reward={}"), agent_case.tokenizer(tmp_path)
    (found,) = turns.findings(config, tasks.build(config.task, config.seed, tokenizer), tokenizer)
    assert found.state == "error" and "the agent took longer than 0.3 s (environment.timeout_s)" in found.text


@pytest.mark.slow
def test_check_of_the_example_plays_its_agent_with_the_tokenizer_that_the_tiny_model_will_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    example = "examples/calculator_agent.toml"
    assert main(["check", example]) == 0
    assert "with the row's answer to each request it got 1 answer, and ended with reward 1" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["check", example, "--no-score"]) == 0
    assert "environment later the agent is played when a run starts" in " ".join(capsys.readouterr().out.split())
