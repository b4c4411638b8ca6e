"""Environments of the `verifiers` library (extra `verifiers`): their tasks, and an agent that plays them.

    [task]         kind = "verifiers", environment = "wordle"           tasks of a taskset
    [environment]  agent = "streamppo.tasks.library.verifiers:run"      its turns, tools and rewards

The library plays a whole episode: its harness sends requests to its proxy, which forwards them to the run's endpoint.
`environment` is the id of a taskset, whose programs then run in processes on this machine, or a TOML file with an
`[env]` table, as for the commands of `verifiers`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from streamppo.config.task import VerifiersTask
from streamppo.errors import TaskError
from streamppo.tasks import split
from streamppo.tasks.environments import Done
from streamppo.tasks.split import SplitPrompts
from streamppo.types import Prompt

SPENT = "context_length_exceeded"
"""Part of the error message of an episode that has used all its requests or tokens."""


def rows(config: VerifiersTask, seed: int) -> SplitPrompts:
    """Take the tasks of an environment, and hold out a share of them."""
    name = config.environment
    data = [task.data for task in _environment(name).taskset.take(config.rows)]
    prompts = [_prompt(task_data, name) for task_data in data]
    keys = [split.key(prompt.text) for prompt in prompts]
    if len(set(keys)) == 1:
        # All tasks of some games, such as Wordle, have the same instructions, and differ only in their other data.
        keys = [split.key(task_data.model_dump_json(exclude={"idx", "name"})) for task_data in data]
    divided = split.divide(prompts, keys, config.held_out, seed)
    return divided._replace(notes=split.describe_repeats(keys, name))


async def run(base_url: str, environment: str, row: str) -> Done:
    """Play one task; its reward is the sum over all traces of the trained seat. Raises `TaskError` after an error."""
    loaded, library = _environment(environment), _library()
    kind = type(loaded.taskset).task_type()
    task = kind(kind.data_type().model_validate_json(row), loaded.taskset.config.task)
    client = library.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with loaded.serving():
        episode = await loaded.run_episode(task, library.ModelContext(model="policy", client=client))
    played = [trace.agent for trace in episode.traces if trace.agent.config.client.base_url == base_url]
    _refuse_seats(environment, {agent.name: agent.trainable for agent in played})
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [error.message for trace in (*episode.traces, episode) for error in trace.errors]
    if not episode.ok and not any(SPENT in message for message in errors):
        raise TaskError(f"the verifiers episode failed: {'; '.join(errors) or 'no error was recorded'}")
    components = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
    scores = {name: reward.value for trace in traces for name, reward in trace.rewards.items() if reward is not None}
    return Done(sum(trace.reward for trace in traces), components | scores)


def _refuse_seats(environment: str, seats: Mapping[str, bool]) -> None:
    """Raise `TaskError` unless the policy plays exactly one seat, which is trained: one reward is for all turns."""
    if untrained := [name for name, is_trained in seats.items() if not is_trained]:
        raise TaskError(
            f"{environment}: the seat {untrained[0]!r} is not to be trained, and the policy plays it: give it a "
            f"`client` of its own in a TOML file of the environment, as [env.{untrained[0]}.client]"
        )
    if len(seats) > 1:
        raise TaskError(
            f"{environment}: the policy plays the seats {', '.join(seats)}, and one reward is for all its turns: give "
            "all except one a `client` of their own in a TOML file of the environment"
        )


@cache
def _environment(name: str) -> Any:
    library = _library()
    loaders = import_module("verifiers.v1.utils.loaders")
    # An environment is a user's code, and may raise any exception while it loads.
    try:
        if name.endswith(".toml"):
            return loaders.load_environment(loaders.resolve_env_config(tomllib.loads(Path(name).read_text())["env"]))
        config = loaders.resolve_env_config({"taskset": {"id": name}})
        local = library.SubprocessConfig()
        seats = {
            seat: seat_config.model_copy(update={"runtime": local})
            for seat, seat_config in config
            if isinstance(seat_config, library.AgentConfig)
        }
        return loaders.load_environment(config.model_copy(update=seats))
    except Exception as error:
        raise TaskError(
            f"verifiers cannot load the environment {name!r}, which must be a taskset of verifiers.v1: {error}; of an "
            "older environment with one turn, use the rows as task.data, and functions of the rubric as reward.function"
        ) from error


def _library() -> Any:
    try:
        return import_module("verifiers.v1")
    except ImportError as error:
        raise TaskError("this task needs verifiers 0.4 or newer: pip install 'streamppo[verifiers]'") from error


def _prompt(data: Any, environment: str) -> Prompt:
    text = data.prompt_text or data.name or data.id or f"task {data.idx}"
    answer = getattr(data, "answer", "")
    columns = {"environment": environment, "row": data.model_dump_json(), "answer": answer}
    return Prompt(
        text=text, columns=columns if isinstance(answer, str) else {**columns, "answer": ""}, source=environment
    )
