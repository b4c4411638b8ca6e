"""Several turns: tokens in, tokens out; observations masked; limits kept; failures named."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_kinds
from scripted import TEMPLATE, Scripted

from streamppo.config.task import Environment, VerifiersTask
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Columns, Episode, place
from streamppo.rollout.player import Player
from streamppo.tasks import task
from streamppo.tasks.environments import Done, Observation
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Identity, Message, Prompt, Reward, Trajectory, decode, encode, floats, ints, routes

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=?![] "
HERE = str(Path(__file__))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return made(tmp_path, TEMPLATE)


def made(folder: Path, template: str) -> Tokenizer:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Tokenizer(folder)


class Panic(BaseException):
    """As the panics of libraries in Rust, no `Exception`."""


class Untold(Exception):
    """An exception, and a value, without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


async def misbehave(how: str) -> Any:
    match how:
        case "raise":
            raise ValueError("no")
        case "cancel":
            client = asyncio.get_running_loop().create_future()
            client.cancel()
            await client
        case "panic":
            raise Panic("index out of bounds")
        case "swallow":
            with suppress(BaseException):
                await asyncio.sleep(60)
            return Done(1.0)
        case "untold":
            raise Untold
        case "unshown number":
            return Done(Untold())  # pyright: ignore[reportArgumentType]
        case _:
            return Untold()


SAID: dict[str, Any] = {
    "number": [Message(role="tool", content=4)],  # pyright: ignore[reportArgumentType]
    "dict": [{"role": "tool", "content": "again"}],
    "no role": [{"content": "again"}],
    "of gym": ("again", 1.0, False, {}),
}


class Echo:
    """Repeats the policy's text twice, with a point for each turn, until it is "bye"."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        return [Message(role="user", content=prompt.text)]

    async def step(self, text: str) -> Any:
        match text:
            case "bye":
                return Done(10.0, {"polite": 1.0}, "it said bye")
            case "hang":
                await asyncio.sleep(60)
            case "raise" | "cancel" | "panic" | "swallow" | "untold" | "unshown" | "unshown number":
                return await misbehave(text)
            case "nothing":
                return None
            case "text":
                return "[raw]"
            case "no number":
                return Done(None)  # pyright: ignore[reportArgumentType]
            case "no component":
                return Done(1.0, {"right": None})  # pyright: ignore[reportArgumentType]
            case "no components":
                return Done(1.0, None)  # pyright: ignore[reportArgumentType]
            case "nan":
                return Observation("[raw]", reward=float("nan"))
            case "number" | "dict" | "no role" | "of gym":
                return SAID[text]
            case "half":
                return "\ud83d"
            case "numpy":
                return Done(np.float32(0.5), {"right": True, "seen": np.int64(3)})  # pyright: ignore
        return Observation([Message(role="tool", content=text * 2)], reward=1.0)


def play(tokenizer: Tokenizer, engine: Scripted, max_tokens: int = 16, **limits: Any) -> Episode:
    config = Environment(name=f"{HERE}:Echo", **limits)
    player = Player(engine, tokenizer, config)
    return asyncio.run(player.play(Prompt(text="hi", columns={}), Sampling(max_tokens)))


def text_of(tokenizer: Tokenizer, tokens: Any) -> str:
    return tokenizer._tokenizer.decode(tokens)


def test_what_was_sampled_is_never_tokenised_again_and_observations_are_masked(tokenizer: Tokenizer) -> None:
    engine = Scripted(tokenizer, "ab", "bye")
    episode = play(tokenizer, engine)
    whole = text_of(tokenizer, episode.tokens)
    assert whole == "ab<eos> [tool]abab<eos> [assistant]bye<eos>"
    assert text_of(tokenizer, episode.tokens[episode.mask]) == "ab<eos>bye<eos>"
    assert text_of(tokenizer, episode.prompt_tokens) == "[user]hi<eos> [assistant]"
    # The engine gets exactly the learner's tokens.
    seen = [*episode.prompt_tokens.tolist(), *episode.tokens.tolist()]
    assert engine.asked[1] == seen[: len(engine.asked[1])]
    assert episode.finish == "stop"
    assert (episode.turns, episode.turn_rewards) == (("ab", "bye"), (1.0, 10.0))
    assert episode.tokens[list(episode.turn_ends)].tolist() == [tokenizer.eos_id] * 2
    assert set(episode.versions[episode.mask].tolist()) == {1, 2}
    assert (episode.logprobs[episode.mask] == -0.5).all() and (episode.logprobs[~episode.mask] == 0).all()


def test_ends_that_are_no_special_tokens_are_in_the_tokens_and_in_no_text(tokenizer: Tokenizer) -> None:
    """The policy ends its turns with "!", or by writing "z"; the environment and the rewards see the text before it."""
    exclaimed = int(tokenizer.encode(Prompt(text="!", columns={}))[0])
    stop = Stop({exclaimed: ["rollout.stop"]}, ("z",))
    for said in ("bye!", "byez"):
        engine = Scripted(tokenizer, "ab!", said)
        engine.ends = False
        player = Player(engine, tokenizer, Environment(name=f"{HERE}:Echo"), stop)
        prompt = Prompt(text="hi", columns={})
        episode = asyncio.run(player.play(prompt, Sampling(16)))
        assert episode.turns == ("ab", "bye") and episode.finish == "stop"
        assert text_of(tokenizer, episode.tokens[episode.mask]) == f"ab!{said}"
        text = episode.text(prompt, tokenizer, stop)
        assert text.completion == "ab [tool]abab [assistant]bye"
        assert text.num_tokens == 7 and text.turns == ("ab", "bye")


def test_rewards_of_turns_stand_on_their_last_tokens_and_scorers_add_to_them(tokenizer: Tokenizer) -> None:
    episode = play(tokenizer, Scripted(tokenizer, "ab", "bye"))
    reward = episode.reward(Reward(score=0.5, turns=(0.0, 2.0), components={"x": 1.0}))
    assert (reward.turns, reward.total) == ((1.0, 12.0), 13.5)
    assert (reward.components, reward.explanation) == ({"polite": 1.0, "x": 1.0}, "it said bye")
    placed = floats(place(reward, episode.mask, episode.turn_ends))
    first, last = episode.turn_ends
    assert (placed[first], placed[last], placed.sum()) == (1.0, 12.5, 13.5)


def test_an_explanation_goes_with_its_trajectory_cut_and_fit_to_travel(tokenizer: Tokenizer) -> None:
    episode = play(tokenizer, Scripted(tokenizer, "ab", "bye"))
    made = episode.trajectory(Identity(task="t", prompt=0, sample=0), "a", Reward(explanation="\ud800" + "x" * 9000))
    assert made.explanation == "?" + "x" * 1999
    assert decode(encode(made), Trajectory) == made


def test_candidates_stand_beside_what_was_sampled_and_observations_have_none(tokenizer: Tokenizer) -> None:
    player = Player(Scripted(tokenizer, "ab", "bye"), tokenizer, Environment(name=f"{HERE}:Echo"))
    episode = asyncio.run(player.play(Prompt(text="hi", columns={}), Sampling(16, top_p=0.5)))
    made = episode.trajectory(Identity(task="t", prompt=0, sample=0), "a", Reward())
    counts, candidates = ints(made.candidate_counts), ints(made.candidates)
    assert counts[episode.mask].tolist() == [2, 2, 1, 2, 2, 2, 1]
    assert not counts[~episode.mask].any()
    first = (counts.cumsum() - counts)[episode.mask]
    assert candidates[first].tolist() == episode.tokens[episode.mask].tolist()
    assert len(candidates) == counts.sum()
    single = asyncio.run(
        Player(Scripted(tokenizer, "ab"), tokenizer, None).play(Prompt(text="hi", columns={}), Sampling(16, top_k=2))
    )
    assert single.candidates is not None and single.candidates.counts.tolist() == [2, 2, 1]
    plain = play(tokenizer, Scripted(tokenizer, "ab", "bye"))
    assert (plain.candidates, plain.trajectory(made.identity, "a", Reward()).candidate_counts) == (None, b"")


def test_every_token_keeps_the_experts_of_the_turn_that_it_came_with(tokenizer: Tokenizer) -> None:
    engine = Scripted(tokenizer, "ab", "bye")
    engine.routes = True
    episode = play(tokenizer, engine)
    made = episode.trajectory(Identity(task="t", prompt=0, sample=0), "a", Reward())
    places, calls = routes.read(made.routes, made.route_bytes, len(made.prompt_tokens + made.tokens) // 4 - 1)[0].T
    first = len(episode.prompt_tokens) + int(np.argmin(episode.mask))
    assert places.tolist() == list(range(len(episode.prompt_tokens) + len(episode.tokens) - 1))
    assert calls.tolist() == [1] * (first - 1) + [2] * (len(calls) - first + 1), "an observation is the next turn's"
    cut = episode.until(3)
    assert cut.routes_SE is not None and len(cut.routes_SE) == len(episode.prompt_tokens) + 2
    assert play(tokenizer, Scripted(tokenizer, "ab", "bye")).routes_SE is None


def test_an_observation_at_the_end_went_through_no_engine(tokenizer: Tokenizer) -> None:
    columns = Columns(np.int32([5, 6]))
    engine = Scripted(tokenizer, "ab")
    engine.routes = True
    columns.add_turn(asyncio.run(engine.generate(columns.prompt_tokens, Sampling(16))), "ab")
    columns.add_observation(np.int32([7, 8]))
    found = columns.episode("length", Done()).routes_SE
    assert found is not None and found[:, 0].tolist() == [0, 1, 2, 3, -1, -1]


def test_scorers_see_turns_and_the_whole(tokenizer: Tokenizer) -> None:
    episode = play(tokenizer, Scripted(tokenizer, "ab", "bye"))
    text = episode.text(Prompt(text="hi", columns={}), tokenizer)
    assert text.completion == "ab [tool]abab [assistant]bye"
    assert (text.turns, text.num_tokens) == (("ab", "bye"), 7)
    assert text.token_ids == episode.tokens[episode.mask].tolist()


def test_a_text_is_an_observation_as_it_is(tokenizer: Tokenizer) -> None:
    episode = play(tokenizer, Scripted(tokenizer, "text", "bye"))
    assert text_of(tokenizer, episode.tokens) == "text<eos>[raw]bye<eos>"


def test_turns_and_tokens_are_bounded_and_a_cut_off_turn_ends_the_trajectory(tokenizer: Tokenizer) -> None:
    turns = play(tokenizer, Scripted(tokenizer, "a", "b", "c"), max_turns=2)
    assert (turns.turns, turns.finish, turns.turn_rewards) == (("a", "b"), "length", (1.0, 1.0))
    assert turns.mask[-1]
    short = Environment(name=f"{HERE}:Echo", max_tokens=30)
    engine = Scripted(tokenizer, "a", "b", "c")
    bounded = asyncio.run(Player(engine, tokenizer, short).play(Prompt(text="hi", columns={}), Sampling(16)))
    assert len(bounded.tokens) <= 30 and bounded.finish == "length" and bounded.mask[-1]
    first = play(tokenizer, Scripted(tokenizer, "much longer than that"))
    assert (len(first.tokens), first.finish) == (16, "length")
    tight = Player(Scripted(tokenizer, "a", "b c d e f g"), tokenizer, Environment(name=f"{HERE}:Echo", max_tokens=32))
    last = asyncio.run(tight.play(Prompt(text="hi", columns={}), Sampling(16)))
    assert (len(last.tokens), last.finish) == (32, "length")
    cut = play(tokenizer, Scripted(tokenizer, "a", "far too long"), max_tokens=5)
    assert (cut.turns, cut.finish, cut.turn_rewards) == (("a", "far t"), "length", (1.0, 0.0))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("raise", r"step: test_episode\.py:\d+: ValueError: no"),
        ("hang", r"step took more than 0\.05 s \(at \w+\.py:\d+\)"),
        ("cancel", r"step: test_episode\.py:\d+: CancelledError: something that it awaits was cancelled"),
        ("panic", r"step: test_episode\.py:\d+: Panic: index out of bounds"),
        ("swallow", r"step took more than 0\.05 s"),
        ("untold", r"step: test_episode\.py:\d+: Untold: <str\(\) raised RuntimeError>"),
        ("unshown", r"not <repr\(\) raised RuntimeError>"),
        ("unshown number", r"step returned <repr\(\) raised RuntimeError>, with a value that is not a finite number"),
        ("nothing", "step must return a Done, an Observation, messages, or a text that is not empty, not None"),
        ("no number", r"step returned Reward\(score=None.*, with a value that is not a finite number"),
        ("no component", "with a value that is not a finite number"),
        ("no components", "whose components are not numbers by name"),
        ("nan", r"step returned Reward\(score=nan.*, with a value that is not a finite number"),
        ("number", r"Observation, messages, or a text that is not empty, not \[Message\(role='tool', content=4\)\]"),
        ("of gym", r"step must return a Done, an Observation, messages, .* not \('again', 1\.0, False, \{\}\)"),
        ("no role", "an environment: a message has the texts `role` and `content`, this is {'content': 'again'}"),
    ],
)
def test_an_environment_that_fails_says_why(tokenizer: Tokenizer, said: str, reason: str) -> None:
    with pytest.raises(EnvironmentFailed, match=reason):
        play(tokenizer, Scripted(tokenizer, said), timeout_s=0.05)


def test_a_message_of_an_environment_may_be_a_dict(tokenizer: Tokenizer) -> None:
    episode = play(tokenizer, Scripted(tokenizer, "dict", "bye"))
    text = episode.text(Prompt(text="hi", columns={}), tokenizer)
    assert text.observations == ((Message(role="tool", content="again"),),)


def test_a_trajectory_that_is_cancelled_itself_is_cancelled(tokenizer: Tokenizer) -> None:
    async def story() -> None:
        player = Player(Scripted(tokenizer, "hang"), tokenizer, Environment(name=f"{HERE}:Echo"))
        playing = asyncio.create_task(player.play(Prompt(text="hi", columns={}), Sampling(16)))
        await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(story())


def test_numbers_of_all_kinds_are_rewards_and_components_of_an_environment(tokenizer: Tokenizer) -> None:
    reward = play(tokenizer, Scripted(tokenizer, "numpy")).reward(Reward())
    assert (reward.total, reward.components) == (0.5, {"right": 1.0, "seen": 3.0})
    assert decode(encode(reward), Reward) == reward


class Broken(Echo):
    """Raises, or hangs, where it is told to."""

    def __init__(self, constructor: str = "", close: str = "") -> None:
        self.how = close
        if constructor:
            raise ConnectionError(constructor)

    async def close(self) -> None:
        if self.how == "hang":
            await asyncio.sleep(60)
        raise RuntimeError(self.how)


@pytest.mark.parametrize(
    ("arguments", "said", "reason"),
    [
        ({"constructor": "no room"}, "bye", r"the constructor: test_episode\.py:\d+: ConnectionError: no room"),
        ({"close": "closed already"}, "bye", r"close: test_episode\.py:\d+: RuntimeError: closed already"),
        ({"close": "hang"}, "bye", r"close took more than 0\.05 s \(at test_episode\.py:\d+\)"),
        # What came first is the reason.
        ({"close": "closed already"}, "raise", r"step: test_episode\.py:\d+: ValueError: no"),
    ],
)
def test_an_environment_that_cannot_be_made_or_closed_fails_its_trajectory(
    tokenizer: Tokenizer, arguments: dict[str, Any], said: str, reason: str
) -> None:
    config = Environment(name=f"{HERE}:Broken", arguments=arguments, timeout_s=0.05)
    player = Player(Scripted(tokenizer, said), tokenizer, config)
    with pytest.raises(EnvironmentFailed, match=f"^{reason}$"):
        asyncio.run(player.play(Prompt(text="hi", columns={}), Sampling(16)))


class TakesNoPrompt(Echo):
    async def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "[raw]"


def test_a_reset_that_takes_no_prompt_fails_its_trajectory(tokenizer: Tokenizer) -> None:
    player = Player(Scripted(tokenizer), tokenizer, Environment(name=f"{HERE}:TakesNoPrompt"))
    with pytest.raises(EnvironmentFailed, match="reset: TypeError"):
        asyncio.run(player.play(Prompt(text="hi", columns={}), Sampling(16)))


def test_a_text_that_is_no_text_fails_its_trajectory(tokenizer: Tokenizer) -> None:
    with pytest.raises(TaskError, match=r"not a text that can be tokenized: '\\ud83d'"):
        play(tokenizer, Scripted(tokenizer, "half"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1].content }}<eos>", "rewrites earlier turns"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "does not end an assistant's turn"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}<eos>{% endfor %}", "words 2 times"),
        ("{{ raise_exception('no tools here') }}", "the chat template refuses the messages: no tools here"),
        ("", "no chat template"),
    ],
)
def test_templates_that_cannot_be_continued_are_refused(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = made(tmp_path, template)
    with pytest.raises(TaskError, match=message):
        tokenizer.observation((Message(role="tool", content="4"),))


@pytest.mark.parametrize("family", sorted(name for name in tokenizer_kinds.CONTROLS if name))
def test_a_family_plays_two_turns_with_an_environment_and_rewards_read_them_as_messages(
    tmp_path: Path, family: str
) -> None:
    made_of = tokenizer_kinds.make("byte_bpe", family)
    made_of.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    end = tokenizer.turn_end() or tokenizer.numbers()["<|user|>"]
    ends = Stop({end: ["chat template"]})

    class Ends(Scripted):
        """Ends its turns as the template does; GLM's with the role of the next one."""

        async def generate(self, prompt: Any, sampling: Any, cuts: Any = None) -> Any:
            said = await super().generate(prompt, sampling, cuts)
            said.tokens[-1] = end
            return said

    prompt = Prompt(text="hi", columns={}, messages=(Message(role="user", content="hi"),))
    config = Environment(name=f"{HERE}:Asks", max_tokens=256)
    engine = Ends(tokenizer, "ab", "bye")
    episode = asyncio.run(Player(engine, tokenizer, config, ends).play(prompt, Sampling(32)))
    text = episode.text(prompt, tokenizer, ends)
    assert (episode.turns, text.turns) == (("ab", "bye"), ("ab", "bye"))
    assert [(one.role, one.content) for one in text.completion_messages] == [
        ("assistant", "ab"),
        ("user", "abab<eos>"),
        ("assistant", "bye"),
    ]
    assert [one.content for one in text.prompt_messages] == ["say hi"]
    # The engine saw the end of the rendered conversation; the spelled token was text.
    turns = (("user", "say hi"), ("assistant", "ab"), ("user", "abab<eos>"))
    whole = Prompt(text="", columns={}, messages=tuple(Message(role=role, content=said) for role, said in turns))
    assert text_of(tokenizer, engine.asked[1]).endswith(tokenizer.render(whole)[-14:])
    assert text_of(tokenizer, engine.asked[1][-14:]) == text_of(tokenizer, tokenizer.ids(whole)[-14:])


def test_a_template_that_counts_turns_counts_those_of_the_whole_conversation(tmp_path: Path) -> None:
    """As ChatGLM2's."""
    tokenizer = made(
        tmp_path,
        "{% for m in messages %}{% if m.role == 'user' %}[{{ loop.index0 // 2 + 1 }}]{% endif %}"
        "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}",
    )
    engine = Scripted(tokenizer, "a", "b", "c", "bye")
    prompt = Prompt(text="hi", columns={}, messages=(Message(role="user", content="hi"),))
    config = Environment(name=f"{HERE}:Asks")
    episode = asyncio.run(Player(engine, tokenizer, config).play(prompt, Sampling(16)))
    whole = text_of(tokenizer, [*episode.prompt_tokens, *episode.tokens])
    said = [text.replace("<eos>", "") for text in ("aa", "bb", "cc")]
    assert [f"[{n}]{text}" in whole for n, text in enumerate(said, 2)] == [True] * 3
    assert whole.startswith("[1]say hia<eos>[2]aa")


class Asks(Echo):
    """Asks as a user, and spells a control token."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        return [Message(role="user", content=f"say {prompt.text}")]

    async def step(self, text: str) -> Any:
        return Done(1.0) if text == "bye" else [Message(role="user", content=f"{text}{text}<eos>")]


def test_without_an_environment_there_isone_turn(tokenizer: Tokenizer) -> None:
    engine = Scripted(tokenizer, "ab")
    prompt = Prompt(text="hi", columns={})
    episode = asyncio.run(Player(engine, tokenizer, None).play(prompt, Sampling(16)))
    assert text_of(tokenizer, episode.tokens) == "ab<eos>"
    assert (episode.mask.all(), episode.turn_ends, episode.turns) == (True, (2,), ())
    scored = Reward(score=1.0)
    assert episode.reward(scored) is scored


def test_a_class_without_the_two_methods_is_no_environment(tokenizer: Tokenizer) -> None:
    with pytest.raises(TaskError, match="no `async def reset`"):
        Player(Scripted(tokenizer), tokenizer, Environment(name=f"{HERE}:Scripted"))
    with pytest.raises(TaskError, match="no `async def close`"):
        Player(Scripted(tokenizer), tokenizer, Environment(name=f"{HERE}:ClosesAtOnce"))


class ClosesAtOnce(Echo):
    def close(self) -> None: ...


def test_verifiers_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TaskError, match=r"streamppo\[verifiers\]"):
        task.build(VerifiersTask(environment="wordle"), 1)


class Closing(Echo):
    """Counts how often it was closed."""

    closed = 0

    async def close(self) -> None:
        Closing.closed += 1


def test_an_environment_is_closed_however_its_trajectory_ends(tokenizer: Tokenizer) -> None:
    async def make() -> Closing:
        return Closing()

    def once(*lines: str) -> None:
        player = Player(Scripted(tokenizer, *lines), tokenizer, Environment(name=f"{HERE}:Closing", max_turns=1))
        player._make = make
        asyncio.run(player.play(Prompt(text="hi", columns={}), Sampling(16)))

    once("bye")
    once("more")
    with pytest.raises(EnvironmentFailed):
        once("raise")
    with pytest.raises(IndexError):
        once()
    assert Closing.closed == 4
