"""Environments: what answers the policy between its turns. `[environment] name = "package.module:Class"`.

    class Environment:                                   one instance for each trajectory
        async def reset(self, prompt: Prompt) -> Said    the first prompt: messages, or a text as it is
        async def step(self, text: str) -> Said | Observation | Done
        async def close(self)                            only if there is something to close

`text` is what the policy said in its turn, special tokens left out. Steps run in the actor's event loop: they must
await what takes long.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from streamppo.config_task import Environment as Config
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.tasks import plugins
from streamppo.tasks.tokens import Said
from streamppo.types import Message, Prompt

T = TypeVar("T")


class Observation(NamedTuple):
    """What the environment says, and the reward of the turn that it answers."""

    said: Said | list[Message]
    reward: float = 0.0


class Done(NamedTuple):
    """The end, the reward of the last turn, and what is logged of the trajectory as reward_NAME."""

    reward: float = 0.0
    components: Mapping[str, float] = MappingProxyType({})
    explanation: str = ""


class Environment(Protocol):
    """See the module."""

    async def reset(self, prompt: Prompt) -> Said | list[Message]:
        """Begin; what the policy is shown first."""
        ...

    async def step(self, text: str) -> "Said | list[Message] | Observation | Done":
        """Answer one turn of the policy."""
        ...


Make: TypeAlias = Callable[[], Environment]


def load(config: Config) -> Make:
    """The constructor of the environment. Raises `TaskError` that says what is wrong with it."""
    found = plugins.load(config.name, "environment.name")
    for method in ("reset", "step"):
        if not asyncio.iscoroutinefunction(getattr(found, method, None)):
            raise TaskError(f"environment.name {config.name!r} has no `async def {method}`")
    return lambda: found(**config.arguments)


async def begin(world: Environment, prompt: Prompt, timeout_s: float) -> Said:
    """What the policy is shown first. Raises `EnvironmentFailed`."""
    return _said(await _bounded(world.reset(prompt), "reset", timeout_s))


async def step(world: Environment, text: str, timeout_s: float) -> Observation | Done:
    """The environment's answer. Raises `EnvironmentFailed`."""
    answer = await _bounded(world.step(text), "step", timeout_s)
    if isinstance(answer, Done):
        return answer
    if isinstance(answer, Observation):
        return answer._replace(said=_said(answer.said))
    return Observation(_said(answer))


async def end(world: Environment) -> None:
    """Close an environment that can be closed, however its trajectory ended."""
    close = getattr(world, "close", None)
    if close is not None:
        await close()


async def _bounded(call: Any, what: str, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise EnvironmentFailed(f"{what} took more than {timeout_s:g} s") from error
    except Exception as error:
        raise EnvironmentFailed(f"{what}: {type(error).__name__}: {error}") from error


def _said(value: Any) -> Said:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and value and all(isinstance(item, Message) for item in value):
        return tuple(value)
    raise EnvironmentFailed(f"an environment says messages or a text that is not empty, not {value!r}")
