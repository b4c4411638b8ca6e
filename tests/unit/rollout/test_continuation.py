"""A recorded episode continues from any of its tokens: its turns as they were, what stands between them asked again."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from scripted import TEMPLATE, Scripted

from streamppo.config.task import Environment
from streamppo.errors import RunError
from streamppo.rollout import random_numbers
from streamppo.rollout.continuation import Continuation, RecordedCompletion
from streamppo.rollout.engine import Completion, Cuts, Sampling
from streamppo.rollout.episode import NO_STOP, Episode
from streamppo.rollout.player import Player
from streamppo.tasks.environments import Done, Observation
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Identity, Ints, Message, Prompt, flags

HERE = str(Path(__file__))
HI = Prompt(text="hi", columns={})
SEED = random_numbers.seed_of(7, Identity(task="t", prompt=3, sample=1))


class Counts:
    """Says how often it was asked, and what; its state is in `said`."""

    other, ends_at = False, "bye"
    asked: ClassVar[list[list[str]]] = []

    def __init__(self) -> None:
        self.said: list[str] = []
        Counts.asked.append(self.said)

    async def reset(self, prompt: Prompt) -> list[Message]:
        return [Message(role="user", content=prompt.text)]

    async def step(self, text: str) -> Any:
        self.said.append(text)
        if text == Counts.ends_at:
            return Done(10.0)
        return Observation([Message(role="tool", content=f"{len(self.said)}{text}{'!' * Counts.other}")], reward=1.0)


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(Counts, "asked", [])
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=?![] ")
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


def play(tokenizer: Tokenizer, engine: Any, *, turns: bool = True, stop: Stop = NO_STOP, limit: int = 16) -> Episode:
    environment = Environment(name=f"{HERE}:Counts", max_turns=4, max_tokens=200) if turns else None
    player = Player(engine, tokenizer, environment, stop)
    # Loaded by its file it would be another class.
    player._make = make
    return asyncio.run(player.play(HI, Sampling(limit, seed=SEED)))


async def make() -> Counts:
    return Counts()


def recorded(episode: Episode) -> RecordedCompletion:
    return RecordedCompletion(episode.prompt_tokens, episode.tokens, episode.mask)


class Drawing:
    """An engine that draws each token from the numbers of the seed alone, as a policy does that sees no context."""

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        seeds = np.full(sampling.max_tokens, sampling.seed, np.uint64)
        tokens = (20 * random_numbers.uniform(seeds, np.arange(sampling.max_tokens))).astype(np.int32) + 3
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "length")


def test_turns_are_the_runs_of_sampled_tokens() -> None:
    nothing = np.zeros(0, np.int32)
    for mask, turns in ((b"\1\1\0\1", [(0, 2), (3, 4)]), (b"\1", [(0, 1)]), (b"\1\0\0", [(0, 1)]), (b"", [])):
        assert RecordedCompletion(nothing, nothing, flags(mask)).turns == turns


@pytest.mark.parametrize("at", [0, 1, 5, 15])
def test_the_rest_of_a_turn_has_the_numbers_that_it_had(tokenizer: Tokenizer, at: int) -> None:
    whole = play(tokenizer, Drawing(), turns=False)
    again = play(tokenizer, Continuation(Drawing(), recorded(whole), at), turns=False)
    assert again.tokens.tolist() == whole.tokens.tolist() and again.finish == "length"
    assert len(again.logprobs) == len(again.versions) == len(again.tokens)


def test_retries_have_numbers_of_their_own() -> None:
    seeds = [random_numbers.seed_of_retry(SEED, number) for number in range(1000)]
    assert len({SEED, *seeds}) == 1001
    assert seeds == [random_numbers.seed_of_retry(SEED, number) for number in range(1000)]


def test_from_a_later_turn_the_environment_is_asked_the_earlier_ones_and_has_its_state(tokenizer: Tokenizer) -> None:
    whole = play(tokenizer, Scripted(tokenizer, "ab", "cde", "bye"))
    start, end = recorded(whole).turns[1]
    assert (whole.turns, end - start) == (("ab", "cde", "bye"), 4)
    rest = Scripted(tokenizer, "xyz", "bye")
    again = play(tokenizer, Continuation(rest, recorded(whole), start + 1))
    assert again.turns == ("ab", "cxyz", "bye") and Counts.asked[1] == ["ab", "cxyz", "bye"]
    assert "2cxyz" in tokenizer.spell(again.tokens.tolist()), "it counts on from the first turn"
    assert again.turn_rewards == (1.0, 1.0, 10.0)
    assert rest.asked[0] == [*whole.prompt_tokens, *whole.tokens[: start + 1]]


def test_at_the_first_token_of_a_turn_all_of_it_is_sampled(tokenizer: Tokenizer) -> None:
    whole = play(tokenizer, Scripted(tokenizer, "ab", "cde", "bye"))
    again = play(tokenizer, Continuation(Scripted(tokenizer, "bye"), recorded(whole), recorded(whole).turns[1][0]))
    assert again.turns == ("ab", "bye")


def test_an_environment_that_says_something_else_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = play(tokenizer, Scripted(tokenizer, "ab", "cde", "bye"))
    monkeypatch.setattr(Counts, "other", True)
    later, (start, _) = Scripted(tokenizer), recorded(whole).turns[1]
    with pytest.raises(RunError, match=f"the context of token {start} is not the recorded one"):
        play(tokenizer, Continuation(later, recorded(whole), start))
    assert later.asked == []


def test_one_that_ends_early_has_begun_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = play(tokenizer, Scripted(tokenizer, "ab", "cde", "bye"))
    monkeypatch.setattr(Counts, "ends_at", "ab")
    again = Continuation(Scripted(tokenizer), recorded(whole), recorded(whole).turns[1][0])
    play(tokenizer, again)
    assert not again.has_begun


def test_another_prompt_is_refused(tokenizer: Tokenizer) -> None:
    whole = play(tokenizer, Scripted(tokenizer, "abc"), turns=False)
    other = recorded(whole)._replace(prompt_tokens=whole.prompt_tokens[1:])
    with pytest.raises(RunError, match="context of token 0"):
        play(tokenizer, Continuation(Scripted(tokenizer, "x"), other, 2), turns=False)


@pytest.mark.parametrize(("rest", "tokens", "finish"), [("yzq", "abxyz", "stop"), ("yyy", "abxyyy<eos>", "stop")])
def test_a_stop_string_that_begins_before_the_token_ends_the_turn(
    tokenizer: Tokenizer, rest: str, tokens: str, finish: str
) -> None:
    stop = Stop({}, ("xyz",))
    whole = play(tokenizer, Scripted(tokenizer, "abxww"), turns=False)
    sampler = Continuation(Scripted(tokenizer, rest), recorded(whole), 3, stop.make_check(tokenizer.spell))
    again = play(tokenizer, sampler, turns=False, stop=stop)
    assert (tokenizer.spell(again.tokens.tolist()), again.finish) == (tokens, finish)
    assert len(again.logprobs) == len(again.versions) == len(again.tokens)


def test_a_turn_that_has_all_its_tokens_before_is_refused(tokenizer: Tokenizer) -> None:
    whole = play(tokenizer, Scripted(tokenizer, "abcdef"), turns=False)
    with pytest.raises(RunError, match="at most 4 tokens: none is left after token 5"):
        play(tokenizer, Continuation(Scripted(tokenizer, "x"), recorded(whole), 5), turns=False, limit=4)
