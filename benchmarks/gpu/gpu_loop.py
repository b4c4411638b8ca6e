"""The default task in one process without Ray: sample, update and swap in turns."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import load_policy, optimizer, policy, tiny
from streamppo.learner.objective import objective
from streamppo.learner.update import Updater
from streamppo.learner.update_metrics import update_metrics
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Completion, Sampling
from streamppo.tasks import task as tasks
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Batch, Identity, Ints, Prompt, Trajectory

MATH = Path(__file__).parents[2] / "configs" / "math.toml"
UPDATES = 400
HELD_OUT = 512
Result = dict[str, object]


class Stages(NamedTuple):
    """The stages of a run, in one process."""

    config: Config
    task: tasks.Task
    tokenizer: Tokenizer
    engine: EmbeddedEngine
    updater: Updater


async def train(folder: Path, device: str, seconds: float) -> Result:
    """Train for `seconds`; return held-out accuracy before and after, and the median milliseconds of each phase."""
    overrides = ["model.dtype=bfloat16", f"updates={UPDATES}", "learner.decay=constant", "checkpoint.every=0"]
    config = configfile.load(MATH, overrides if device == "cuda" else [*overrides, "model.tiny.max_steps=10"])
    tiny.make(config, folder / "model")
    stages = _stages(config, folder / "model", device)
    before = await _accuracy(stages)
    phases: list[tuple[float, float, float]] = []
    end, mismatch = time.monotonic() + seconds, []
    while time.monotonic() < end and len(phases) < UPDATES:
        times, metrics = await _update(stages, len(phases))
        phases.append(times)
        mismatch.append(metrics["mismatch"])
    after = await _accuracy(stages)
    await stages.engine.stop()
    names = ("sample_ms", "update_ms", "swap_ms")
    return {
        "updates": len(phases),
        "accuracy_before": before,
        "accuracy_after": after,
        "mismatch": statistics.mean(mismatch),
        **{
            name: round(1e3 * statistics.median(column), 2)
            for name, column in zip(names, zip(*phases, strict=True), strict=True)
        },
    }


def _stages(config: Config, folder: Path, device: str) -> Stages:
    mesh = init_device_mesh(device, (1,))
    trained = load_policy.load(config.model, folder, config.rollout.temperature, mesh)
    updater = Updater(
        trained, optimizer.adamw(trained, config), objective.build(config), config, group=mesh.get_group()
    )
    tokenizer = Tokenizer(str(folder))
    engine = EmbeddedEngine(
        AutoConfig.from_pretrained(folder),
        policy.gather_weights(trained, config.model.dtype),
        version=0,
        slots=config.rollout.slots,
        max_total_tokens=32,
        ends=EndTokens({tokenizer.eos_id or 0}),
        seed=config.seed,
        dtype=torch.bfloat16,
        device=device,
    )
    return Stages(config, tasks.build(config.task, config.seed, tokenizer), tokenizer, engine, updater)


async def _update(stages: Stages, version: int) -> tuple[tuple[float, float, float], dict[str, float]]:
    """Return ((seconds of sampling, of the update, of the swap), the update's metrics)."""
    config, count = stages.config, stages.config.queue.batch_size // stages.config.queue.samples_per_prompt
    begin = time.perf_counter()
    numbers = [version * count + n for n in range(count) for _ in range(config.queue.samples_per_prompt)]
    prompts = [stages.task.prompt(number) for number in numbers]
    done = await _sample(stages, prompts, config.rollout.temperature)
    rows = [
        _trajectory(stages, Identity(task="math", prompt=number, sample=n % config.queue.samples_per_prompt), *made)
        for n, (number, made) in enumerate(zip(numbers, zip(prompts, done, strict=True), strict=True))
    ]
    sampled = time.perf_counter()
    optimizer.follow_schedule(stages.updater.optimizer, config, version)
    batch = pad(Batch(version=version, min_version=version, trajectories=tuple(rows))).to(stages.updater.device)
    metrics = update_metrics(stages.updater, stages.updater.update(batch))
    learned = time.perf_counter()
    await stages.engine.update_weights(version + 1, policy.gather_weights(stages.updater.policy, config.model.dtype))
    return (sampled - begin, learned - sampled, time.perf_counter() - learned), metrics


async def _sample(stages: Stages, prompts: Sequence[Prompt], temperature: float) -> list[Completion]:
    sampling = Sampling(stages.config.rollout.max_tokens, temperature)
    requests = (stages.engine.generate(stages.tokenizer.encode(prompt), sampling) for prompt in prompts)
    return await asyncio.gather(*requests)


def _trajectory(stages: Stages, identity: Identity, prompt: Prompt, made: Completion) -> Trajectory:
    tokens: Ints = stages.tokenizer.encode(prompt)
    return Trajectory(
        identity=identity,
        actor="gpu_loop",
        prompt_tokens=tokens.tobytes(),
        tokens=made.tokens.tobytes(),
        logprobs=made.logprobs.tobytes(),
        versions=made.versions.tobytes(),
        mask=bytes([1]) * len(made.tokens),
        finish=made.finish,
        reward=_is_right(stages, prompt, made),
    )


def _is_right(stages: Stages, prompt: Prompt, made: Completion) -> float:
    said = stages.tokenizer.decode(made.tokens)
    return float(made.finish == "stop" and said == prompt.columns["answer"])


async def _accuracy(stages: Stages) -> float:
    """The fraction of right greedy answers to held-out problems."""
    prompts = stages.task.held_out(HELD_OUT)
    done = await _sample(stages, prompts, 0.0)
    return statistics.mean(_is_right(stages, prompt, made) for prompt, made in zip(prompts, done, strict=True))
