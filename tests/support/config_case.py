"""Configurations of one entry, as the short forms of a file make them."""

from typing import Any

from streamppo.config.reward import FunctionScorer, Reward
from streamppo.config.task import DataTask, Source


def one_source(**fields: Any) -> DataTask:
    """A task of one data set."""
    return DataTask(sources={"data": Source(**fields)})


def one_function(**fields: Any) -> Reward:
    """A reward of one function."""
    return Reward(scorers={"reward": FunctionScorer(**fields)})
