"""Environments answer the policy between its turns. `[environment] name = "package.module:Class"`.

    class Environment:                                   one instance for each trajectory
        async def reset(self, prompt: Prompt) -> Said    the first prompt: messages, or a text as it is
        async def step(self, text: str) -> Said | Observation | Done
        async def close(self)                            only if there is something to close

`text` is the policy's turn, special tokens left out. Steps run in the actor's event loop: they must await all that
takes long, and those that do not are named and counted (stalls.py). An environment that raises, takes too long, or
gives a number that is not finite, fails its trajectory, with the reason that came first.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

from streamppo.config.task import Environment as Config
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.tasks import plugins, user_traceback
from streamppo.tasks.rewards.outcome import QUOTED, plain
from streamppo.tasks.stalls import EnvironmentCalls, EventLoopStalls, TooLate
from streamppo.tasks.tokenizer import Said
from streamppo.types import Message, Prompt, Reward


class Observation(NamedTuple):
    """The environment's words, and the reward of the turn that they answer."""

    said: Said | list[Message]
    reward: float = 0.0


class Done(NamedTuple):
    """The end, with the reward of the last turn; each of `components` is logged as reward_NAME."""

    reward: float = 0.0
    components: Mapping[str, float] = MappingProxyType({})
    explanation: str = ""


class Environment(Protocol):
    """See the module."""

    async def reset(self, prompt: Prompt) -> Said | list[Message]:
        """Begin, and return the text that the policy sees first."""
        ...

    async def step(self, text: str) -> "Said | list[Message] | Observation | Done":
        """Answer one turn of the policy."""
        ...


Make: TypeAlias = Callable[[], Awaitable[Environment]]
T = TypeVar("T")


def load(config: Config) -> Make:
    """Load the environment's class; the function makes one of it. Raises `TaskError` if it is no environment."""
    found = plugins.load(config.name, "environment.name")
    for method in ("reset", "step", "close"):
        there = getattr(found, method, None)
        if not asyncio.iscoroutinefunction(there) and (there is not None or method != "close"):
            raise TaskError(f"environment.name {config.name!r} has no `async def {method}`")

    make_one = cast(Callable[..., Environment], found)
    plugins.check_arguments(make_one, config.arguments, f"environment.name {config.name!r}")

    async def make() -> Environment:
        return make_one(**config.arguments)

    return make


class EnvSession:
    """An environment at play; every method raises `EnvironmentFailed`."""

    def __init__(self, environment: Environment, calls: EnvironmentCalls) -> None:
        self._environment = environment
        self._calls = calls

    async def begin(self, prompt: Prompt) -> Said:
        """Begin, and return the text that the policy sees first."""
        return _describe_answer(await _within_time("reset", self._calls, partial(self._environment.reset, prompt)))

    async def step(self, text: str) -> Observation | Done:
        """Ask the environment for its answer, its numbers plain and finite floats."""
        answer = await _within_time("step", self._calls, partial(self._environment.step, text))
        if isinstance(answer, Done):
            # Any mapping will do: `plain` makes a dict of it.
            components = cast(dict[str, float], answer.components)
            checked = _plain(Reward(score=answer.reward, components=components, explanation=answer.explanation))
            return Done(checked.score, checked.components, checked.explanation)
        if isinstance(answer, Observation):
            return Observation(_describe_answer(answer.said), _plain(Reward(score=answer.reward)).score)
        return Observation(_describe_answer(answer))

    async def close(self) -> None:
        """End it, if there is something to end."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            await _within_time("close", self._calls, close)


@asynccontextmanager
async def open_session(make: Make, stalls: EventLoopStalls) -> AsyncGenerator[EnvSession]:
    """Make an environment, and close it however its trajectory ends. Raises `EnvironmentFailed`."""
    calls = EnvironmentCalls(stalls)
    world = EnvSession(await _within_time("the constructor", calls, make), calls)
    try:
        yield world
    # Also a cancellation.
    except BaseException:
        # The trajectory has its reason, which one more failure must not hide.
        with suppress(EnvironmentFailed):
            await world.close()
        raise
    await world.close()


async def _within_time(method: str, calls: EnvironmentCalls, call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await calls.call(call)
    except TooLate as error:
        raise EnvironmentFailed(f"{method} {error}") from error
    # Other people's environments raise anything.
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(f"{method}: {user_traceback.format_user_error(error)}") from error


def _plain(reward: Reward) -> Reward:
    try:
        return plain(reward)
    except ValueError as error:
        raise EnvironmentFailed(f"step gave {repr(reward)[:QUOTED]}, {error}") from error


def _describe_answer(value: object) -> Said:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and value and all(map(_is_message, value)):
        return tuple(value)
    raise EnvironmentFailed(f"an environment says messages or a text that is not empty, not {repr(value)[:QUOTED]}")


def _is_message(value: object) -> bool:
    match value:
        case Message(role=str(), content=str() | None):
            return True
        case _:
            return False
