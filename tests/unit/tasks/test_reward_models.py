"""Scores by models: a classifier in batches, a service and a judge behind HTTP."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import ray
from conftest import save_reward_model
from http_service import serving, trickling
from ray.exceptions import RayActorError

from streamppo.config.reward import FunctionScorer, JudgeScorer, ModelScorer, Reward, ServiceScorer
from streamppo.errors import RewardFailed, TaskError
from streamppo.tasks.rewards.outcome import Outcome
from streamppo.tasks.rewards.reward_model import Models, RewardModel, create
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.rewards.service import Service
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.types import Message, Prompt, ScoredText, decode, encode

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=[] "


def text(completion: str, **more: Any) -> ScoredText:
    return ScoredText(prompt="1+2=", completion=completion, finish="stop", num_tokens=len(completion), **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_reward_model(tmp_path, ALPHABET)
    return tmp_path


def scores(model: RewardModel, *texts: ScoredText) -> list[Outcome]:
    return list(decode(model.score(encode(texts)), tuple[Outcome, ...]))


def test_a_batch_scores_as_each_text_alone_and_a_long_one_fails_alone(folder: Path) -> None:
    model = RewardModel(str(folder), 0, 20, "float32")
    texts = [text("3"), text("a longer one"), text("4")]
    together = scores(model, *texts, text("x" * 50))
    assert "54 tokens are more than the reward model's max_tokens (20)" in together[3].reason
    alone = [scores(model, one)[0] for one in texts]
    values = [[outcome.reward.score for outcome in found if outcome.reward] for found in (together, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert len({round(value, 6) for value in values[0]}) == 3


def test_a_chat_needs_the_reward_models_own_template(folder: Path) -> None:
    chat = text("3", messages=(Message(role="user", content="1+2="),))
    with pytest.raises(TaskError, match="the reward model's tokenizer has no chat template"):
        RewardModel(str(folder), 0, 100, "float32").score(encode((chat,)))
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    model = RewardModel(str(folder), 0, 100, "float32")
    plain = ScoredText(prompt="[user]1+2=", completion="[assistant]3", finish="stop", num_tokens=1)
    assert scores(model, chat)[0].reward == scores(model, plain)[0].reward


def test_an_output_that_the_model_does_not_have_is_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match="has 1 outputs"):
        RewardModel(str(folder), 1, 100, "float32")


# --- in Ray ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=256 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def created(config: Reward) -> Models:
    return create(config, lambda _: {"num_cpus": 0})


def hired(config: Reward, models: Models, prompt: Prompt, given: ScoredText) -> Any:
    """Use reward models from an actor, as a rollout actor does."""

    class Scoring:
        async def start(self) -> int:
            self._rewards = Rewards(config, models)
            await self._rewards.start({""})
            return os.getpid()

        async def score(self) -> float:
            return (await self._rewards.score(prompt, given)).total

    remote: Any = ray.remote(Scoring)
    return remote.options(num_cpus=0).remote()


@pytest.mark.slow
@pytest.mark.usefixtures("a_ray")
def test_a_reward_model_outlives_the_rollout_actors(folder: Path) -> None:
    config = Reward(scorers={"lasting": ModelScorer(path=str(folder), attempts=1)})
    whom = config, created(config), Prompt(text="1+2=", columns={}), text("3")
    first, second = hired(*whom), hired(*whom)
    pid = ray.get(first.start.remote())
    ray.get(second.start.remote())
    score = ray.get(second.score.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(first.score.remote())
    replacement = hired(*whom)
    ray.get(replacement.start.remote())
    assert ray.get([replacement.score.remote(), second.score.remote()]) == [score, score]


@pytest.mark.slow
@pytest.mark.usefixtures("a_ray")
def test_a_reward_model_that_is_killed_comes_back_and_the_calls_that_it_had_are_made_again(folder: Path) -> None:
    scorer = ModelScorer(path=str(folder), attempts=12, backoff_s=0.1)
    config = Reward(scorers={"mortal": scorer})
    prompt, before = Prompt(text="1+2=", columns={}), reward_models()

    async def story() -> None:
        models = created(config)
        early, late = Rewards(config, models), Rewards(config, models)
        hasty = Rewards(Reward(scorers={"mortal": msgspec.structs.replace(scorer, timeout_s=0.3)}), models)
        await asyncio.gather(early.start({""}), hasty.start({""}))
        score = (await early.score(prompt, text("3"))).total
        (process,) = reward_models() - before
        process.suspend()
        under_way = asyncio.create_task(early.score(prompt, text("3")))
        with pytest.raises(RewardFailed, match=r"no score after 0\.3 s"):
            await hasty.score(prompt, text("3"))
        assert not under_way.done()
        process.kill()
        await asyncio.gather(under_way, late.start({""}))
        assert [under_way.result().total, (await late.score(prompt, text("3"))).total] == [score, score]
        (report,) = early.report()
        assert (report.calls, report.failed) == (2, 0)
        assert report.retries >= 1
        assert reward_models() - before - {process}

    asyncio.run(story())


def reward_models() -> set[psutil.Process]:
    """List the processes of all reward models."""
    found: set[psutil.Process] = set()
    for child in psutil.Process().children(recursive=True):
        # It may end in between.
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child} if "ray::RewardModel" in child.cmdline()[:1] else set()
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("a_ray")
def test_a_reward_model_that_cannot_be_loaded_says_why(folder: Path) -> None:
    config = Reward(scorers={"wrong": ModelScorer(path=str(folder), label=3)})
    with pytest.raises(TaskError, match=f"{folder} cannot be loaded: .*has 1 outputs: there is no output 3$"):
        asyncio.run(Rewards(config, created(config)).start({""}))


# --- HTTP ----------------------------------------------------------------------------------------------------


async def ask(config: Reward, *texts: ScoredText, **columns: Any) -> list[Any]:
    rewards = Rewards(config)
    await rewards.start({""})
    try:
        prompt = Prompt(text="1+2=", columns=columns)
        return await asyncio.gather(*(rewards.score(prompt, one) for one in texts), return_exceptions=True)
    finally:
        await rewards.close()


def test_a_service_gets_the_trajectory_and_its_row_and_answers_with_a_score() -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"score": float(body["completion"] == body["columns"]["answer"]), "short": 0.5}

    async def story() -> None:
        async with serving(answer) as url:
            config = Reward(scorers={"remote": ServiceScorer(url=f"{url}/score")})
            found = await ask(config, text("3"), text("4"), answer="3")
            assert [reward.total for reward in found] == [1.0, 0.0]
            assert found[0].components == {"short": 0.5}
            assert asked[0]["prompt"] == "1+2="

    asyncio.run(story())


@pytest.mark.parametrize(
    ("said", "found"),
    [
        # The two answers of OpenRLHF's examples, `serve_rm.py` and a function's dict.
        (
            {"rewards": [0.5], "scores": [0.25], "extra_logs": {"dummy_scores": [0.5]}},
            {"scores": 0.25, "dummy_scores": 0.5},
        ),
        ({"rewards": 0.5}, {}),
        ({"rewards": [0.5, 0.5]}, "rewards is not a finite number"),
        ({"reward": [0.5]}, "a dict without `score`"),
    ],
)
def test_a_server_of_openrlhf_gets_its_lists_and_answers_with_lists_of_one(said: Any, found: Any) -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        asked.append(body)
        return 200, said

    async def story() -> None:
        async with serving(answer) as url:
            config = Reward(scorers={"remote": ServiceScorer(url=f"{url}/get_reward", form="openrlhf")})
            (scored,) = await ask(config, text("3"), answer="3")
            assert asked == [{"query": ["1+2=3"], "prompts": ["1+2="], "labels": ["3"]}]
            if isinstance(found, str):
                assert found in str(scored)
            else:
                assert (scored.total, scored.components) == (0.5, found)

    asyncio.run(story())


def test_a_busy_server_is_asked_again_and_other_errors_are_not() -> None:
    calls: list[str] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        calls.append(body["completion"])
        if body["completion"] == "busy":
            return (503, {}) if calls.count("busy") < 3 else (200, {"score": 2.0})
        return 404, "no such scorer"

    async def story() -> None:
        async with serving(answer) as url:
            config = Reward(scorers={"remote": ServiceScorer(url=url, backoff_s=0.01)})
            busy, missing = await ask(config, text("busy"), text("missing"))
            assert busy.total == 2.0
            assert isinstance(missing, RewardFailed) and "status 404" in str(missing)
            assert calls.count("missing") == 1
            (gone,) = await ask(
                Reward(scorers={"remote": ServiceScorer(url="http://127.0.0.1:9", attempts=1)}), text("")
            )
            assert "ConnectError" in str(gone)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("20", 20.0), ("0.5", 0.5), ("-1", 0.0), ("nan", 0.0), ("soon", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_a_busy_server_says_when_it_may_be_asked_again(header: str, seconds: float) -> None:
    async def story() -> None:
        async with serving(lambda path, body: (429, {}, f"Retry-After: {header}")) as url:
            remote = Service(ServiceScorer(url=url))
            (outcome,) = await remote.call((text("3"),), ({},))
            await remote.close()
            assert (outcome.retryable, outcome.after_s) == (True, seconds)

    asyncio.run(story())


def test_a_slow_server_is_a_failure() -> None:
    async def story() -> None:
        async with serving(lambda path, body: (200, {"score": 1.0}), latency_s=1.0) as url:
            (found,) = await ask(Reward(scorers={"remote": ServiceScorer(url=url, timeout_s=0.1)}), text(""))
            assert "no score after 0.1 s" in str(found)

    asyncio.run(story())


def test_the_bound_is_on_the_call_and_not_on_its_single_bytes() -> None:
    async def story() -> None:
        async with trickling(every_s=0.05) as url:
            (found,) = await ask(Reward(scorers={"remote": ServiceScorer(url=url, timeout_s=0.3)}), text(""))
            assert "no score after 0.3 s" in str(found)

    asyncio.run(story())


def judge_says(said: str) -> Any:
    return lambda path, body: (200, {"choices": [{"message": {"content": said + body["messages"][0]["content"][-1]}}]})


@pytest.mark.parametrize(
    ("said", "score"),
    [
        *[(said, 0.8) for said in ("8", "8/10", "**8**", "Score: 8.", "from 0 to 10: 8 out of 10.", r"\boxed{8}")],
        ("7.5 / 10", 0.75),
        ("18", 1.8),
        *[(said, None) for said in ("eight", "80%", "8 or so")],
    ],
)
def test_the_number_at_the_end_of_a_judgement_is_read_as_models_write_it(said: str, score: float | None) -> None:
    judge = JudgeScorer(url="http://x", model="m", question="q", scale=10.0)
    found = re.search(judge.pattern, said)
    assert (found and float(found[1]) / judge.scale) == score


def test_a_service_whose_answer_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def page(self: object, url: str, body: object) -> bytes:
        return b"<html>"

    async def main() -> None:
        monkeypatch.setattr("streamppo.tasks.rewards.client.Client.post", page)
        service = ServiceScorer(url="http://x/score", attempts=1)
        (found,) = await ask(Reward(scorers={"service": service}), text("3"))
        assert "http://x/score: the answer is no JSON: b'<html>'" in str(found)

    asyncio.run(main())


def test_a_judge_is_asked_in_words_and_its_number_is_scaled() -> None:
    async def story() -> None:
        async with serving(judge_says("It is good. Score: ")) as url:
            judge = JudgeScorer(
                url=f"{url}/v1", model="any", question="{prompt}{completion} {x} of {level}", scale=10.0
            )
            (found,) = await ask(Reward(scorers={"judge": judge}), text("3"), level=8)
            assert found.total == 0.8
            assert found.explanation == "It is good. Score: 8"
            (found,) = await ask(Reward(scorers={"judge": judge}), text("3"), level="x")
            assert "the judge gave no number" in str(found)

    asyncio.run(story())


def test_a_models_score_can_take_precedence_over_functions() -> None:
    async def story() -> None:
        async with serving(lambda path, body: (200, {"score": 5.0})) as url:
            scorers = {
                "model": ServiceScorer(url=url, sources=("",)),
                "exact": FunctionScorer(function="streamppo.tasks.library.arithmetic:score"),
            }
            for combine, expected in (("sum", 6.0), ("model_first", 5.0)):
                (found,) = await ask(Reward(scorers=scorers, combine=combine), text("3"), answer="3")  # pyright: ignore
                assert found.total == expected
                assert found.components == {"model": 5.0, "exact": 1.0}

    asyncio.run(story())


def test_a_key_that_is_not_set_is_an_error_at_once() -> None:
    with pytest.raises(TaskError, match="NO_SUCH_KEY"):
        asyncio.run(ask(Reward(scorers={"remote": ServiceScorer(url="http://x", key_env="NO_SUCH_KEY")}), text("")))
