"""Configurations with one entry, equal to the short forms in a file."""

from typing import Any

from streamppo.config.reward import FunctionScorer, Reward
from streamppo.config.task import DataTask, Source


def one_source(**fields: Any) -> DataTask:
    """A task with one data set."""
    return DataTask(sources={"data": Source(**fields)})


def one_function(**fields: Any) -> Reward:
    """A reward with one function."""
    return Reward(scorers={"reward": FunctionScorer(**fields)})
