"""A whole run in one process, without Ray: the task, the embedded engine and the updater of a configuration.

For studies of the effect of data on learning: the age of the data is chosen and does not depend on time.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streamppo.config.sections import Config
from streamppo.learner.model import load_policy, optimizer, policy
from streamppo.learner.objective import objective
from streamppo.learner.update import Updater
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Sampling
from streamppo.rollout.player import Player
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Identity, Ints, Prompt, ScoredText, Trajectory


class World(NamedTuple):
    """The parts of a run, which a real run has in several processes."""

    config: Config
    task: tasks.Task
    tokenizer: Tokenizer
    engine: EmbeddedEngine
    updater: Updater
    rewards: Rewards
    player: Player

    async def swap(self, version: int) -> None:
        """Load the updater's weights into the engine."""
        await self.engine.update_weights(version, policy.gather_weights(self.updater.policy, self.config.model.dtype))


def alone(folder: Path, device: str = "cpu") -> None:
    """Initialise a process group of this process alone, which all its worlds need, and use one thread."""
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)


async def build(
    config: Config,
    model: Path,
    *,
    slots: int,
    max_total_tokens: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> World:
    """Make the world of `config` with the model in the folder `model`, on "cpu" or "cuda"; its engine has `dtype`."""
    torch.manual_seed(config.seed)
    mesh = init_device_mesh(device, (1,))
    trained = load_policy.load(config.model, model, config.rollout.temperature, mesh)
    trained.set_context(config.queue.prefix)
    adamw = optimizer.adamw(trained, config)
    updater = Updater(trained, adamw, objective.build(config), config, group=mesh.get_group())
    tokenizer = Tokenizer(str(model))
    engine = EmbeddedEngine(
        trained.lm.config,
        policy.gather_weights(trained, config.model.dtype),
        version=0,
        slots=slots,
        max_total_tokens=max_total_tokens,
        ends=EndTokens({tokenizer.eos_id or 0}),
        seed=config.seed,
        dtype=dtype,
        device=device,
    )
    task, rewards = tasks.build(config.task, config.seed, tokenizer), Rewards(config.reward)
    await rewards.start(task.sources())
    player = Player(engine, tokenizer, config.environment, scored=bool(config.reward.scorers))
    return World(config, task, tokenizer, engine, updater, rewards, player)


async def sampled(world: World, numbers: Sequence[int], version: int) -> list[Trajectory]:
    """Play and score one trajectory for each entry of `numbers`, with the engine's weights, which are `version`."""
    prompts = [world.task.prompt(number) for number in numbers]
    sampling = Sampling(world.config.rollout.max_tokens, world.config.rollout.temperature)
    episodes = await asyncio.gather(*(world.player.play(prompt, sampling) for prompt in prompts))
    made: list[Trajectory] = []
    for place, (number, prompt, episode) in enumerate(zip(numbers, prompts, episodes, strict=True)):
        sample = place % world.config.queue.samples_per_prompt
        identity = Identity(task=world.config.name, prompt=number, sample=sample)
        scored = await world.rewards.score(prompt, episode.text(prompt, world.tokenizer))
        of_version = episode._replace(versions=np.full(len(episode.tokens), version, np.int32))
        made.append(of_version.trajectory(identity, "world", episode.reward(scored)))
    return made


async def next_batch(world: World, number: int, version: int) -> list[Trajectory]:
    """Sample the trajectories of batch `number`; each batch has its own prompts."""
    queue = world.config.queue
    count = queue.batch_size // queue.samples_per_prompt
    prompts = range(number * count, (number + 1) * count)
    return await sampled(world, [one for one in prompts for _ in range(queue.samples_per_prompt)], version)


async def accuracy(world: World) -> float:
    """Return the share of `evaluation.prompts` held-out prompts whose greedy answer has reward 1."""
    prompts = world.task.held_out(world.config.evaluation.prompts)
    found = await scores(world, prompts, Sampling(world.config.rollout.max_tokens, 0.0))
    return sum(one == 1.0 for one in found) / len(found)


async def scores(world: World, prompts: Sequence[Prompt], sampling: Sampling) -> list[float]:
    """Play every prompt, and return the rewards."""
    episodes = await asyncio.gather(*(world.player.play(prompt, sampling) for prompt in prompts))
    found: list[float] = []
    for prompt, episode in zip(prompts, episodes, strict=True):
        scored = await world.rewards.score(prompt, episode.text(prompt, world.tokenizer))
        found.append(episode.reward(scored).total)
    return found


async def reward(world: World, prompt: Prompt, tokens: Ints, *, finished: bool) -> float:
    """Return the score of one completion; without `finished` it counts as truncated."""
    said, finish = world.tokenizer.decode(tokens), "stop" if finished else "length"
    text = ScoredText(prompt=prompt.text, completion=said, finish=finish, num_tokens=len(tokens))
    return (await world.rewards.score(prompt, text)).score
