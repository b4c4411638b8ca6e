"""Environments answer the policy between its turns. `[environment] name = "package.module:Class"`.

    class Environment:                           one instance for each trajectory
        async def reset(self, prompt: Prompt)    returns the first prompt: messages, or a plain text
        async def step(self, text: str)          returns messages, a plain text, an `Observation` or a `Done`
        async def close(self)                    optional

`text` is the policy's turn without special tokens. A message is a `Message`, or a dict with role and content. Steps run
in the actor's event loop, so they must await long work; blocking steps are logged and counted (stalls.py). An error, a
timeout or a number that is not finite fails the trajectory.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

from streamppo.config.task import Environment as Config
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.tasks import chat, plugins, user_traceback
from streamppo.tasks.coroutines import TooLate
from streamppo.tasks.rewards.outcome import QUOTED, plain
from streamppo.tasks.stalls import EnvironmentCalls, EventLoopStalls
from streamppo.tasks.tokenizer import EnvironmentText
from streamppo.types import Message, Prompt, Reward


class Observation(NamedTuple):
    """The environment's answer to a turn, and the reward of that turn."""

    said: EnvironmentText | list[Message]
    reward: float = 0.0


class Done(NamedTuple):
    """The end of a trajectory, with the reward of its last turn. Each of `components` is logged as reward_NAME."""

    reward: float = 0.0
    components: Mapping[str, float] = MappingProxyType({})
    explanation: str = ""


class Environment(Protocol):
    """A user's environment; see the module's docstring."""

    async def reset(self, prompt: Prompt) -> EnvironmentText | list[Message]: ...

    async def step(self, text: str) -> "EnvironmentText | list[Message] | Observation | Done": ...


Make: TypeAlias = Callable[[], Awaitable[Environment]]
T = TypeVar("T")


def load(config: Config) -> Make:
    """Load the environment's class; return a function that makes instances. Raises `TaskError` for an invalid class."""
    environment = plugins.load(config.name, "environment.name")
    for method in ("reset", "step", "close"):
        member = getattr(environment, method, None)
        if not asyncio.iscoroutinefunction(member) and (member is not None or method != "close"):
            raise TaskError(f"environment.name {config.name!r} has no `async def {method}`")
    environment_class = cast(Callable[..., Environment], environment)
    plugins.check_arguments(environment_class, config.arguments, f"environment.name {config.name!r}")

    async def make() -> Environment:
        return environment_class(**config.arguments)

    return make


class EnvSession:
    """A running environment. Every method raises `EnvironmentFailed` if the environment fails."""

    def __init__(self, environment: Environment, calls: EnvironmentCalls) -> None:
        self._environment = environment
        self._calls = calls

    async def begin(self, prompt: Prompt) -> EnvironmentText:
        said = await _within_time("reset", self._calls, partial(self._environment.reset, prompt))
        return _check_text(said, "reset must return")

    async def step(self, text: str) -> Observation | Done:
        """Return the environment's answer to a turn, with numbers as plain finite floats."""
        answer = await _within_time("step", self._calls, partial(self._environment.step, text))
        if isinstance(answer, Done):
            # `_plain` accepts any mapping and converts it to a dict.
            components = cast(dict[str, float], answer.components)
            checked = _plain(Reward(score=answer.reward, components=components, explanation=answer.explanation))
            return Done(checked.score, checked.components, checked.explanation)
        if isinstance(answer, Observation):
            said = _check_text(answer.said, "an Observation must have")
            return Observation(said, _plain(Reward(score=answer.reward)).score)
        return Observation(_check_text(answer, "step must return a Done, an Observation,"))

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            await _within_time("close", self._calls, close)


@asynccontextmanager
async def open_session(make: Make, stalls: EventLoopStalls) -> AsyncGenerator[EnvSession]:
    """Make an environment, and always close it at the end of the block. Raises `EnvironmentFailed`."""
    calls = EnvironmentCalls(stalls)
    session = EnvSession(await _within_time("the constructor", calls, make), calls)
    try:
        yield session
    # Close the environment after any error, also after a cancellation.
    except BaseException:
        # If `close` fails too, raise only the first error.
        with suppress(EnvironmentFailed):
            await session.close()
        raise
    await session.close()


async def _within_time(method: str, calls: EnvironmentCalls, call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await calls.call(call)
    except TooLate as error:
        raise EnvironmentFailed(f"{method} {error}") from error
    except BaseException as error:
        if not user_traceback.is_of_user(error):
            raise
        raise EnvironmentFailed(f"{method}: {user_traceback.format_user_error(error)}") from error


def _plain(reward: Reward) -> Reward:
    try:
        return plain(reward)
    except ValueError as error:
        raise EnvironmentFailed(f"step returned {user_traceback.describe(reward)[:QUOTED]}, {error}") from error


def _check_text(value: object, rule: str) -> EnvironmentText:
    """Return a text or messages. Raises `EnvironmentFailed`, which begins with `rule`, for other values."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and value and all(map(_is_message, value)):
        try:
            return tuple(item if isinstance(item, Message) else chat.message(item, "an environment") for item in value)
        except TaskError as error:
            raise EnvironmentFailed(str(error)) from error
    quoted = user_traceback.describe(value)[:QUOTED]
    raise EnvironmentFailed(f"{rule} messages, or a text that is not empty, not {quoted}")


def _is_message(value: object) -> bool:
    """Return whether a value is a valid message or a dict, which `chat.message` reads."""
    if isinstance(value, Message):
        return isinstance(value.role, str) and isinstance(value.content, str | None)
    return isinstance(value, Mapping)
