"""Every example of docs/rewards.md is executed as it stands there."""

import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import tomli_w
import torch
from conftest import MATH, REPOSITORY, save_reward_model
from http_service import serving
from scripted import TEMPLATE, Scripted

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import RewardFailed
from streamppo.rollout.engine import Sampling
from streamppo.rollout.player import Player
from streamppo.tasks import plugins
from streamppo.tasks.rewards import reward_model as model
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Prompt, Reward, ScoredText

PAGE = (REPOSITORY / "docs" / "rewards.md").read_text()
BLOCK = re.compile(r"^```(python|toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^##+ (.*)$", re.MULTILINE)
PROMPT = Prompt(text="12+34=", columns={"answer": "46"}, source="arithmetic")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with every file of the page in it."""
    for kind, text in BLOCK.findall(PAGE):
        if kind == "python":
            path = tmp_path / text.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(heading: str, *overrides: str) -> Config:
    """configs/math.toml with the tables of the section in place of its own."""
    sections = dict(zip(HEADING.findall(PAGE), HEADING.split(PAGE)[2::2], strict=True))
    tree: dict[str, Any] = tomllib.loads(MATH.read_text())
    for kind, text in BLOCK.findall(sections[heading]):
        if kind == "toml":
            tree |= tomllib.loads(text)
    Path("docs.toml").write_text(tomli_w.dumps(tree))
    return configfile.load(Path("docs.toml"), overrides)


def said(completion: str) -> ScoredText:
    tokens = torch.arange(len(completion), dtype=torch.int32).numpy().tobytes()
    return ScoredText(
        prompt=PROMPT.text, completion=completion, finish="stop", num_tokens=len(completion), tokens=tokens
    )


async def scored(heading: str, *completions: str, overrides: tuple[str, ...] = ()) -> list[Reward | RewardFailed]:
    rewards = Rewards(config(heading, *overrides).reward)
    await rewards.start({"arithmetic"})
    try:
        asked = (rewards.score(PROMPT, said(completion)) for completion in completions)
        return await asyncio.gather(*asked, return_exceptions=True)  # pyright: ignore[reportReturnType]
    finally:
        await rewards.close()


def totals(heading: str, *completions: str) -> list[float | str]:
    found = asyncio.run(scored(heading, *completions))
    return [one.total if isinstance(one, Reward) else str(one) for one in found]


@pytest.mark.slow
def test_an_async_function_asks_a_service_many_times_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([True])

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if next(busy, False):
            return 503, {}
        return 200, {"score": float(body["given"] == body["wanted"]), "length": len(body["given"]), "why": "equal"}

    async def story() -> None:
        async with serving(answer, together=80) as url:
            monkeypatch.setenv("JUDGE", url)
            # The page's 5 s are enough unless the machine has other things to do.
            found = await scored(
                "An async function that asks a service", *["46", "47"] * 50, overrides=("reward.timeout_s=60",)
            )
            assert [one.total for one in found if isinstance(one, Reward)] == [1.0, 0.0] * 50
            assert found[0].components == {"length": 2.0}  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(story())


def test_every_scorer_of_ours_that_the_page_names_exists() -> None:
    ours = PAGE[PAGE.index("`streamppo.tasks.scorers` has these scorers") :].split("\n\n")[1]
    named = re.findall(r"`(\w+:\w+)`", ours)
    assert len(named) >= 7
    for name in named:
        assert callable(plugins.load(f"streamppo.tasks.scorers.{name}", "reward.function"))


def test_a_class_keeps_its_state(folder: Path) -> None:
    assert totals("A class with state", "a", "A", "b", "a") == [1.0, 0.5, 1.0, pytest.approx(1 / 3)]


def test_a_sync_function_that_computes_for_ever_fails_alone(folder: Path) -> None:
    found = totals("A sync function with long computations", "7", "8", "2305843009213693951", "11", "x")
    assert (found[:2], found[3]) == ([1.0, 0.0], 1.0)
    assert re.fullmatch(r"no score after 1 s \(at \w+\.py:\d+\)", str(found[2]))
    assert "ValueError" in str(found[4])


def test_trls_signature(folder: Path) -> None:
    assert totals("TRL's signature", "46", "47", "46") == [0.5, 0.0, 0.5]


def test_verls_signature(folder: Path) -> None:
    found = asyncio.run(scored("verl's signature", "46", " 46 ", "47"))
    rewards = [one for one in found if isinstance(one, Reward)]
    assert [(one.total, one.components) for one in rewards] == [
        (1.0, {"stripped": 0.0}),
        (1.0, {"stripped": 1.0}),
        (0.0, {"stripped": 0.0}),
    ]


def test_several_rewards(folder: Path) -> None:
    found = asyncio.run(scored("Several rewards", "46", "so: 46"))
    rewards = [one for one in found if isinstance(one, Reward)]
    assert [one.total for one in rewards] == [1.0, 1.0 - 0.5 * 0.5]
    assert rewards[1].components == {"right": 1.0, "brief": -0.5}


@pytest.mark.slow
def test_a_reward_model_in_its_own_actor(folder: Path) -> None:
    save_reward_model(folder / "rm", "0123456789+=")
    wanted = config("A reward model")
    wanted = msgspec.convert(
        {
            **msgspec.to_builtins(wanted),
            "reward": {"scorers": {"preference": {"kind": "model", "path": f"{folder}/rm"}}},
        },
        Config,
    )

    async def story() -> list[Reward]:
        rewards = Rewards(wanted.reward, model.create(wanted.reward, lambda _: {"num_cpus": 0}))
        await rewards.start({"arithmetic"})
        return list(await asyncio.gather(*(rewards.score(PROMPT, said(c)) for c in ("46", "47", "46"))))

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        first, second, third = asyncio.run(story())
    finally:
        ray.shutdown()
    assert first.total == pytest.approx(third.total, abs=1e-6)
    assert first.total != second.total


def test_a_service_and_a_judge_are_two_tables(folder: Path) -> None:
    assert set(config("A service or a judge without code").reward.scorers) == {"remote", "judge"}


def test_a_tool_is_used_over_two_turns(folder: Path) -> None:
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=[] ")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "tokenizer")
    tokenizer = Tokenizer(folder / "tokenizer")
    chosen = config("Several turns and tools")
    assert chosen.reward.scorers == {}
    engine = Scripted(tokenizer, "calc 12+34", "46")
    episode = asyncio.run(Player(engine, tokenizer, chosen.environment).play(PROMPT, Sampling(32)))
    reward = episode.reward(Reward())
    assert (reward.turns, reward.components) == ((-0.1, 1.0), {"answered": 1.0})
    assert "[tool]46" in episode.text(PROMPT, tokenizer).completion
