"""Starts an engine in this process, and reward models on a Ray cluster, for commands that do not train."""

from collections.abc import Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from streamppo.config.sections import Config
from streamppo.rollout import build
from streamppo.rollout.engine import Engine
from streamppo.tasks.rewards import reward_model as model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.actor import ActorProxy

    from streamppo.tasks.rewards.reward_model import RewardModel


@asynccontextmanager
async def engine(
    config: Config, name: str, path: str, version: int, tensors: Mapping[str, Tensor]
) -> "AsyncGenerator[Engine]":
    """Run an engine with the weights `tensors` of `version`. `path` has the model's config.json and tokenizer."""
    built = await build.engine(config, name, path, version, tensors)
    try:
        yield built
    finally:
        await built.stop()


@contextmanager
def reward_models(config: Config) -> "Generator[Mapping[str, ActorProxy[RewardModel]]]":
    """Run the reward models of a configuration on a new Ray cluster; without reward models, Ray is not started."""
    scorers = config.reward.models()
    if not scorers:
        yield {}
        return
    from streamppo.driver.ray import cluster, environment

    @contextmanager
    def started(mark: str) -> Generator[None]:
        with environment.own_ray_environment(mark, cluster.show_origins()):
            cluster.init_own_ray()
        yield

    with cluster.command_ray(started):
        yield model.create(config.reward, lambda name: {"num_cpus": 0, "num_gpus": scorers[name].gpus})
