"""Procedural tasks of reasoning-gym (extra `gym`), scored by its verifiers."""

import ast
import json
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np

from streamppo.config.task import GymTask
from streamppo.errors import TaskError
from streamppo.tasks import split
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.split import SplitPrompts
from streamppo.types import Prompt, ScoredText


def rows(config: GymTask, seed: int) -> SplitPrompts:
    """Make the first `size` problems of a reasoning-gym data set, and hold out a share of the distinct questions."""
    try:
        data = _library().create_dataset(config.dataset, size=config.size, seed=seed, **config.parameters)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(f"reasoning-gym's {config.dataset!r} cannot be made: {error}") from error
    prompts = [_prompt(data[number], config) for number in range(config.size)]
    keys = [split.key(prompt.text) for prompt in prompts]
    try:
        divided = split.divide(prompts, keys, config.held_out, seed)
    except TaskError as error:
        raise TaskError(f"reasoning-gym's {config.dataset!r}: {error}") from error
    return divided._replace(notes=split.describe_repeats(keys, config.dataset))


def _prompt(entry: Row, config: GymTask) -> Prompt:
    # The verifier runs in another process, where some data sets generate a different entry from the same seed. So the
    # row has the entry itself, as a Python literal: JSON would turn tuples into lists.
    with np.printoptions(legacy="1.25"):  # writes numpy's numbers without their types
        literal = repr(entry)
    columns = {
        "answer": entry["answer"],
        "dataset": config.dataset,
        "parameters": json.dumps(config.parameters, sort_keys=True),
        "entry": literal,
    }
    return Prompt(text=entry["question"] + config.suffix, columns=columns, source=config.dataset)


def score(trajectory: ScoredText, dataset: str, parameters: str, entry: str) -> float:
    """Return reasoning-gym's score, 0 to 1. `entry` is a Python literal. Not async: slow verifiers run in a process."""
    return float(_verifier(dataset, parameters)(trajectory.completion.strip(), ast.literal_eval(entry)))


@cache
def _verifier(dataset: str, parameters: str) -> Callable[[str, Row], float]:
    return _library().create_dataset(dataset, **json.loads(parameters)).score_answer


def _library() -> ModuleType:
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError("this task needs reasoning-gym: pip install 'streamppo[gym]'") from error
