"""Two updates of a configuration on a table policy: fast enough for hundreds of configurations."""

import math
import random

import learner_case as case
import msgspec
import table_policy as tables
import torch
from conftest import trajectory

from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.types import Batch


def answers(config: Config) -> PaddedBatch:
    """A batch with rows of 1 to 3 tokens, up to `max_lag` versions old; the first prompt's rewards are all equal."""
    generator, samples, max_lag = random.Random(0), config.queue.samples_per_prompt, config.queue.max_lag
    made = []
    for row in range(config.queue.batch_size):
        tokens = [generator.randrange(4) for _ in range(generator.randint(1, 3))]
        answer = trajectory(
            tokens,
            prompt=[0],
            number=row // samples,
            sample=row % samples,
            versions=sorted(generator.randint(max(0, 3 - max_lag), 3) for _ in tokens),
            logprobs=[math.log(0.25) + generator.uniform(-0.1, 0.1) for _ in tokens],
            reward=1.0 if row < samples < config.queue.batch_size else float(row % 2),
            finish="length" if row % 5 == 3 else "stop",
        )
        # The reward components of GDPO in the chaos campaign.
        made.append(msgspec.structs.replace(answer, components={"right": answer.reward, "again": float(row % 3)}))
    return pad(Batch(version=3, min_version=3 - max_lag, trajectories=tuple(made)))


def make(config: Config) -> None:
    """Assert that two updates have finite metrics, make steps, and change the weights that are trained."""
    policy = tables.TablePolicy([0.25] * 4, [0.0, 0.5, 1.0, 0.25])
    reference = tables.TablePolicy([0.4, 0.3, 0.2, 0.1], [0.0] * 4) if config.algorithm.kl.on else None
    updater = tables.updater(config, policy, reference, torch.optim.SGD(policy.parameters(), lr=0.1))
    learned = (policy.lm.logits_V, policy.values_V)
    before = [parameter.detach().clone() for parameter in learned]
    for _ in range(2):
        metrics = case.metrics(updater, answers(config))
        assert [name for name, number in metrics.items() if not math.isfinite(number)] == []
        assert metrics["bad_steps"] == 0
        assert metrics["steps"] + metrics.get("critic_steps", 0) > 0
    assert all(parameter.isfinite().all() for parameter in learned)
    in_warm_up = config.algorithm.critic.warmup_updates > 0
    moved = [not torch.equal(*pair) for pair in zip(before, learned, strict=True)]
    assert moved == [not in_warm_up, config.algorithm.has_critic]
