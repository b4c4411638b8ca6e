"""Checks of the task's data, the rewards and the environment."""

import logging
import os
from pathlib import Path

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.model import find
from streamppo.config.reward import FunctionScorer, JudgeScorer, ModelScorer, Scorer, ServiceScorer
from streamppo.config.sections import BUILTIN, Config
from streamppo.config.task import DataTask
from streamppo.errors import StreamppoError, TaskError
from streamppo.learner import tiny
from streamppo.tasks import environments
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards, recognised, shown
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

ROWS = 64
"""Rows of every data set that are read."""

log = logging.getLogger(__name__)


def load(config: Config, tokenizer: Tokenizer | None) -> tuple[Task | None, list[Finding]]:
    """Build the task on the first rows of its data. None if they are not here, or are wrong."""
    if absent := [place for place in _places(config) if not Path(place).exists()]:
        text = "is no file or folder here; as a name on the hub it is not asked"
        return None, [Finding("task", "not here", f"{place!r} {text}") for place in absent]
    try:
        task = tasks.build(config.task, config.seed, tokenizer, limit=ROWS)
        found = [Finding("task", "ok", _prompts(task, tokenizer))]
    except StreamppoError as error:
        return None, [Finding("task", "error", str(error))]
    try:
        if config.model.path == BUILTIN:
            tiny.answered(task)
    except StreamppoError as error:
        found.append(Finding("task", "error", str(error)))
    return task, found


def _places(config: Config) -> list[str]:
    """Files, folders or names on the hub from which the task's data comes."""
    if not isinstance(config.task, DataTask):
        return []
    sources = config.task.sources.values()
    return [place for source in sources for place in (source.data, source.evaluation) if place is not None]


def _prompts(task: Task, tokenizer: Tokenizer | None) -> str:
    first = task.training[:ROWS]
    text = f"the first prompt is {first[0].text[:60]!r}"
    if tokenizer is None:
        return text
    return f"{text}; the first {len(first)} have up to {max(len(tokenizer.encode(prompt)) for prompt in first)} tokens"


def rewards(config: Config, task: Task | None) -> Findings:
    """Check every scorer, and that there is one for every data source."""
    prompts = task.training[:ROWS] if task is not None else ()
    for name, scorer in config.reward.scorers.items():
        subject = f"reward {name}"
        try:
            yield _scorer(subject, scorer, [one for one in prompts if _is_for(scorer, one)])
        except TaskError as error:
            yield Finding(subject, "error", str(error))
    try:
        for source in sorted(task.sources()) if task is not None else ():
            Rewards(config.reward).of(source)
    except TaskError as error:
        yield Finding("reward", "error", str(error))


def _is_for(scorer: Scorer, prompt: Prompt) -> bool:
    return not scorer.sources or prompt.source in scorer.sources


def _scorer(subject: str, scorer: Scorer, prompts: list[Prompt]) -> Finding:
    match scorer:
        case FunctionScorer():
            how, in_actor = recognised(scorer)
            for prompt in prompts:
                how.columns(prompt.columns)
            return Finding(subject, "ok", shown(scorer, how, in_actor=in_actor))
        case ModelScorer():
            return find(scorer.path, subject)[1]
        case ServiceScorer() | JudgeScorer():
            missing = scorer.key_env and not os.environ.get(scorer.key_env)
            key = f"; the environment has no {scorer.key_env} here" if missing else ""
            return Finding(subject, "not here", f"{scorer.url} is asked when the run starts{key}")


def environment(config: Config) -> Findings:
    """Check that the environment can be loaded, if there is one."""
    if config.environment is None:
        return
    try:
        environments.load(config.environment)
    except TaskError as error:
        yield Finding("environment", "error", str(error))
        return
    yield Finding("environment", "ok", f"{config.environment.name}, up to {config.environment.max_turns} turns")
