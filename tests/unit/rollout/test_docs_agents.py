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

from streamppo.commands.checks import turns
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode, Player
from streamppo.tasks import task as tasks
from streamppo.types import Prompt

PAGE = (REPOSITORY / "docs" / "agents.md").read_text()
BLOCK = re.compile(r"^```(python|toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CALL = '<tool_call>{"name": "search", "arguments": {"word": "tide"}}</tool_call>'


def test_the_agent_of_the_page_asks_calls_its_tool_and_is_rewarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, code), (_, table) = BLOCK.findall(PAGE)
    (tmp_path / "agents").mkdir()
    (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    monkeypatch.chdir(tmp_path)
    given = tomllib.loads(table)["environment"]
    config = AgentEnvironment(**{name: value for name, value in given.items() if name != "kind"})
    tokenizer = agent_case.tokenizer(tmp_path / "model")

    async def main() -> Episode:
        engine = Speaks(tokenizer, lambda text: "twice a day" if "[tool]" in text else CALL)
        player = Player(engine, tokenizer, config)  # pyright: ignore
        assert player.agents is not None
        try:
            prompt = Prompt(text="How often?", columns={"answer": "twice"})
            return await player.play(prompt, Sampling(200))
        finally:
            await player.agents.close()

    episode = asyncio.run(main())
    assert episode.turn_rewards == (0.0, 1.0) and not episode.branches
    whole = tokenizer.spell([*episode.prompt_tokens.tolist(), *episode.tokens.tolist()])
    assert whole == (
        f"[tools]search <eos>[user]How often?<eos>[assistant]{CALL}<eos>"
        "[tool]The tide turns twice a day.<eos>[assistant]twice a day<eos>"
    )


@pytest.mark.parametrize(
    ("agent", "state", "said"),
    [
        ("one_turn", "ok", "to the row's answer as a turn it ended the conversation"),
        ("until_refused", "ok", "to the row's answer as a turn it answered 'user: "),
        ("raises", "note", "it fails on the row's answer as a turn: the agent: agents_of_every_kind.py"),
        ("never_calls", "error", "it fails on the row's answer as a turn: the agent made no request"),
    ],
)
def test_check_plays_an_agent_with_the_rows_own_answer(
    agent: str, state: str, said: str, math_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = math_config(
        f"environment.agent={SUPPORT / 'agents_of_every_kind.py'}:{agent}", "environment.max_turns=2", "reward={}"
    )
    tokenizer = agent_case.tokenizer(tmp_path)
    (found,) = turns.findings(config, tasks.build(config.task, config.seed, tokenizer), tokenizer)
    assert (found.subject, found.state) == ("environment", state)
    assert said in found.text
