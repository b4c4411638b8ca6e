"""Checks the task's data, the scorers and the environment."""

import shlex
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from streamppo.commands.checks.finding import Finding, Findings, contacted_later, reward_subject, where_it_was
from streamppo.commands.checks.folder import find, weights
from streamppo.commands.checks.rows import UnreadableAnswers, scores_source
from streamppo.config.model import BUILTIN
from streamppo.config.reward import FunctionScorer, JudgeScorer, ModelScorer, Scorer, ServiceScorer
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment, DataTask, Environment
from streamppo.errors import StreamppoError, TaskError
from streamppo.tasks import agent, dataset_files, environments, stop, warmup_data
from streamppo.tasks import task as tasks
from streamppo.tasks.data import Measure
from streamppo.tasks.rewards.scoring import Rewards, describe, detect
from streamppo.tasks.rewards.styles import VERL
from streamppo.tasks.scorers.code import CodeTests
from streamppo.tasks.task import Task
from streamppo.types import Prompt

CODE = "streamppo.tasks.scorers.code:CodeTests"
ROWS = 64
"""Number of prompts that are examined, and of rows that are read if the data are large."""


class LoadedTask(NamedTuple):
    """The task (None if its data are missing or invalid), findings about it, and warm-up data of builtin:tiny."""

    task: Task | None
    findings: list[Finding]
    lesson: warmup_data.Lesson | None = None


def load(config: Config, tokenizer: Measure | None, *, limit: int | None = None) -> LoadedTask:
    """Build the task from its first `limit` rows (None: all). Without a `tokenizer`, report unreadable answers too."""
    if absent := [place for place in _places(config) if not Path(place).exists()]:
        return LoadedTask(None, [_absent(place) for place in absent])
    builtin = config.model.path == BUILTIN
    measure = warmup_data.Characters() if builtin else tokenizer
    unreadable = UnreadableAnswers(config) if tokenizer is None else None
    try:
        task = tasks.build(config.task, config.seed, measure, limit=limit, visit=unreadable)
        lesson = warmup_data.warmup_of_task(task) if builtin else None
    except StreamppoError as error:
        return LoadedTask(None, [Finding("task", "error", str(error))])
    findings = [Finding("task", "ok", _prompts(task, measure))]
    # With a limit no notes are reported: a note about the first rows may be wrong for the whole data.
    findings += [Finding("task", "note", note) for note in task.notes() if limit is None]
    if unreadable is None:
        return LoadedTask(task, findings, lesson)
    for number, prompt in enumerate(() if isinstance(config.task, DataTask) else task.training):
        unreadable(f"problem {number}", prompt)
    return LoadedTask(task, [*findings, *unreadable.findings()], lesson)


def _absent(place: str) -> Finding:
    text = f"{place!r} is not a file or folder here{where_it_was(place)}"
    if not dataset_files.may_be_hub_name(place):
        return Finding("task", "not here", text)
    if find_spec("datasets") is None:
        text += "; to load it by that name from the hub, pip install 'streamppo[data]'"
        return Finding("task", "not here", text)
    return Finding("task", "later", f"{text}; as a name on the hub it is contacted when the run starts")


def mib(config: Config) -> float:
    """Return the size of the task's files on this machine, in MiB."""
    paths = [Path(place) for place in _places(config)]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return sum(file.stat().st_size for file in files) / 2**20


def _places(config: Config) -> list[str]:
    if not isinstance(config.task, DataTask):
        return []
    sources = config.task.sources.values()
    return [place for source in sources for place in (source.data, source.evaluation) if place is not None]


def _prompts(task: Task, measure: Measure | None) -> str:
    first = task.training[:ROWS]
    text = f"the first prompt is {first[0].text[:60]!r}"
    if measure is None:
        return text
    lengths = [min(len(measure.ids(prompt)), prompt.max_tokens or sys.maxsize) for prompt in first]
    return f"{text}; the first {len(first)} have up to {max(lengths)} tokens"


def rewards(config: Config, task: Task | None) -> Findings:
    """Check every scorer, and that every data source has a scorer."""
    prompts = task.training[:ROWS] if task is not None else ()
    for name, scorer in config.reward.scorers.items():
        subject = reward_subject(name)
        try:
            yield _scorer(subject, scorer, [prompt for prompt in prompts if scores_source(scorer, prompt)])
            if isinstance(scorer, ModelScorer):
                yield from weights(scorer.path, subject)
        except TaskError as error:
            yield Finding(subject, "error", str(error))
    try:
        if task is not None:
            Rewards(config.reward).match(task.sources(), every=True)
    except TaskError as error:
        yield Finding("reward", "error", str(error))


def _scorer(subject: str, scorer: Scorer, prompts: list[Prompt]) -> Finding:
    match scorer:
        case FunctionScorer():
            signature, in_actor = detect(scorer)
            for prompt in prompts:
                signature.columns(prompt.columns)
            text = describe(scorer, signature, in_actor=in_actor)
            columns = {name for prompt in prompts for name in prompt.columns} - VERL.parameters.keys()
            if hidden := sorted(signature.style_parameters & columns):
                text = f"{text}; it does not get the columns {', '.join(hidden)}, whose names are its parameters"
            if scorer.function == CODE:
                text = f"{text}; {CodeTests.place(scorer.arguments)}"
            return Finding(subject, "ok", text)
        case ModelScorer():
            return find(scorer.path, subject)[1]
        case ServiceScorer() | JudgeScorer():
            return contacted_later(subject, scorer.url, scorer.key_env)


def environment(config: Config) -> Findings:
    """Check that the environment, if any, can be loaded."""
    if config.environment is None:
        return
    match config.environment:
        case Environment(name=name) as environment:
            load, bound = partial(environments.load, environment), "turns"
        case AgentEnvironment(agent=name, command=command) as environment:
            load, bound = partial(_check_agent, environment), "requests"
            name = name or shlex.join(command)
    try:
        load()
    except TaskError as error:
        yield Finding("environment", "error", str(error))
        return
    yield Finding("environment", "ok", f"{name}, up to {environment.max_turns} {bound}")


def _check_agent(environment: AgentEnvironment) -> None:
    agent.check(environment)
    command = environment.command
    if command and environment.sandbox is None and shutil.which(command[0]) is None:
        raise TaskError(f"environment.command begins with {command[0]!r}, which is not a program here")


def limit(config: Config) -> Findings:
    """Check that the function of rollout.limit, if any, can be loaded."""
    try:
        stop.load_limit(config.rollout.limit, config.rollout.max_tokens)
    except TaskError as error:
        yield Finding("rollout", "error", str(error))
