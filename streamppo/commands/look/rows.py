"""Finds a trajectory's row of data, answer first. The task is built again, and its data may have changed."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamppo import process
from streamppo.config import consent
from streamppo.config.sections import Config, model_path
from streamppo.config.task import VerifiersTask
from streamppo.errors import StreamppoError
from streamppo.tasks import task as tasks
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.terminal import bounded
from streamppo.types import Trajectory, ints

SHOWN = 400


class DataRow(NamedTuple):
    """(name, repr of the value) of every column, or the reason why the row is `missing`."""

    columns: list[tuple[str, str]]
    missing: str = ""


class RunRows:
    """Finds rows of data of the run in `folder`. The data are read when the first row is needed."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._folder = config, folder

    def row_of(self, trajectory: Trajectory) -> DataRow:
        task, tokenizer, missing = self._task
        if task is None or tokenizer is None:
            return DataRow([], missing)
        prompt = task.prompt(trajectory.identity.prompt)
        # With an environment the trajectory may not begin with the row's prompt.
        if self._config.environment is None:
            try:
                is_same = np.array_equal(tokenizer.encode(prompt), ints(trajectory.prompt_tokens))
            except StreamppoError as error:
                return DataRow([], f"its row cannot be read: {error}")
            if not is_same:
                return DataRow([], "its row is unknown: the task's data differ from the run's")
        names = sorted(prompt.columns, key=lambda name: name != "answer")
        return DataRow([(name, bounded(repr(prompt.columns[name]), SHOWN)) for name in names])

    @cached_property
    def _task(self) -> tuple[Task | None, Tokenizer | None, str]:
        try:
            if isinstance(self._config.task, VerifiersTask):
                consent.require(self._folder, [self._config])
            tokenizer = Tokenizer(model_path(self._config, self._folder))
            with process.naming_prints():
                return tasks.build(self._config.task, self._config.seed, tokenizer), tokenizer, ""
        except StreamppoError as error:
            return None, None, f"rows cannot be read: {error}"
