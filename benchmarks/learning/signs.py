"""Why negative advantages mislead: both signs of one batch's gradient, beside the exact gradient of the expected score.

    python benchmarks/learning/signs.py --json signs.json [--tasks add sort] [--lags 0 16] [--seeds 4 5 6 7 8]

Each run trains by a rule of negatives.py at an exact lag. Every `EVERY` updates, before the step, the policy's gradient
on the batch of that update is split by the sign of the advantage, once with weights truncated at 2 (`truncate`) and
once with TOPR's (`topr`). A prompt of these tasks has one right answer, so the expected score is known exactly:

    J = mean over 512 held-out prompts of p(right answer | prompt)

A row keeps, of each measurement, the squared lengths and products of the three gradients `positive`, `negative` and
`exact`, from which the table follows: cosines of each sign with `exact`, and the weight w of negatives for which
positive + w negative is closest to the direction of `exact`. Beside them what the whole update did to the responses of
each sign: the mean change of p(response) of sampled right and wrong responses, and of J. The table has the cosine
with `exact` of positive + w negative for w = 1, 0.25, the share of positive tokens (`share`), the weight at which both
signs have equal length (`equal`), and the best one.

The thresholds were set before the first run (`GOALS`).
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.learning import negatives
from benchmarks.lib import world
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.pace import Fixed, batches, step
from benchmarks.lib.runs import Goal, machine, table, told
from streamppo.algorithms.aggregate import denominators
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.batching import ActiveRows
from streamppo.learner.model import tiny
from streamppo.learner.objective import objective
from streamppo.learner.objective.loss import Loss
from streamppo.learner.update import Updater, score
from streamppo.types import Batch, Identity, Prompt, Trajectory

EVERY = 10
"""Updates between two measurements."""
PROMPTS = 512
TASKS = ("add", "subtract", "sort")
"""Tasks with one right answer a prompt, which is their column `answer`."""
ABOUT = ("reward", "entropy", "ess", "grad_norm", "behavior_kl")
"""Metrics of an update that are stored; one without trained tokens lacks some."""
CORRECTIONS = {"truncate": "{kind='truncate'}", "topr": "{kind='topr'}"}
GOALS = {
    "fresh": Goal("add: cosine of negatives with exact over that of positives, truncate, lag 0", most=0.5),
    "old": Goal("add: the same, truncate, lag 16", most=0.5),
    "weight": Goal("add: best weight of negatives, topr, lag 16", least=0.1, most=0.5),
    "easy": Goal("sort: best weight of negatives, topr, lag 16", least=0.1, most=0.5),
}
Gradient = Tensor
"""All gradients of the policy, end to end."""


def right_answers(made: world.World, prompts: Sequence[Prompt], version: int) -> PaddedBatch:
    """A batch of `prompts` with their right answers as completions."""
    rows: list[Trajectory] = []
    for number, prompt in enumerate(prompts):
        tokens = made.tokenizer.encode_turn(prompt.columns["answer"], "stop")
        rows.append(
            Trajectory(
                identity=Identity(task="right", prompt=number, sample=0),
                actor="world",
                prompt_tokens=made.tokenizer.encode(prompt).tobytes(),
                tokens=tokens.tobytes(),
                logprobs=np.zeros(len(tokens), np.float32).tobytes(),
                versions=np.full(len(tokens), version, np.int32).tobytes(),
                mask=np.ones(len(tokens), np.bool_).tobytes(),
                finish="stop",
                reward=1.0,
            )
        )
    return pad(Batch(version=version, min_version=version, trajectories=tuple(rows)))


def probabilities(made: world.World, batch: PaddedBatch) -> Tensor:
    """[B] p(completion | prompt) by the learner's weights, differentiable."""
    scored = score(made.updater.policy, batch, torch.arange(len(batch.reward_B)), "policy")
    width = scored.logprobs_BT.shape[1]
    return scored.logprobs_BT.masked_fill(~batch.mask_BT[:, :width], 0.0).sum(-1).exp()


def _gradient(made: world.World) -> Gradient:
    """Take the accumulated gradient of the policy's weights."""
    parameters = list(made.updater.policy.lm.parameters())
    found = torch.cat([torch.zeros(one.numel()) if one.grad is None else one.grad.flatten() for one in parameters])
    for one in made.updater.policy.parameters():
        one.grad = None
    return found.double()


class Signs(NamedTuple):
    """The policy's ascent directions of a batch by the sign of the advantage, and the share of positive tokens."""

    positive: Gradient
    negative: Gradient
    share: float


def by_sign(made: world.World, config: Config, batch: PaddedBatch) -> Signs:
    """Split the gradient of `batch`, with the correction of `config`, without entropy bonus and before any step."""
    functions, rows = objective.build(config), torch.arange(len(batch.reward_B))
    policy, all_B = made.updater.policy, torch.ones(len(rows), dtype=torch.bool)
    updater = Updater(policy, made.updater.optimizer, functions, config, group=made.updater.group)
    targets, _ = updater.prepare(functions, batch, ActiveRows(all_B, all_B, ~all_B))
    counts = denominators(batch.mask_BT, constant=config.rollout.max_tokens)
    found: list[Gradient] = []
    for weight in (0.0, 1.0):
        loss = Loss(functions, replace(config.algorithm, negative_weight=weight), batch, targets, 0.0)
        loss.share(rows, "policy", score(policy, batch, rows, "policy"), counts).loss.backward()
        found.append(-_gradient(made))
    advantages = targets.estimate.advantages[targets.trained_BT]
    share = float((advantages > 0).sum() / max(1, int((advantages != 0).sum())))
    return Signs(found[0], found[1] - found[0], share)


def products(positive: Gradient, negative: Gradient, exact: Gradient) -> dict[str, float]:
    """Squared lengths and products of the three gradients."""
    named = {"p": positive, "n": negative, "j": exact}
    pairs = ("pp", "nn", "jj", "pn", "pj", "nj")
    return {pair: float(named[pair[0]] @ named[pair[1]]) for pair in pairs}


def cosine(found: Mapping[str, float], weight: float) -> float:
    """The cosine of positive + weight negative with exact."""
    length = found["pp"] + 2 * weight * found["pn"] + weight**2 * found["nn"]
    return (found["pj"] + weight * found["nj"]) / math.sqrt(max(length * found["jj"], 1e-300))


def best_weight(found: Mapping[str, float]) -> float:
    """The weight in [0, 1] with the largest `cosine`, on a grid of a hundredth."""
    return max((at / 100 for at in range(101)), key=partial(cosine, found))


async def measure(case: negatives.Case, config: Config, variants: Mapping[str, Config], model: Path) -> dict[str, Any]:
    """Train by `config` at an exact lag, and measure with each of `variants` before every `EVERY`th update."""
    made = await world.build(config, model, slots=256, max_total_tokens=config.rollout.max_tokens + 80)
    pace = Fixed(case.lag)
    prompts = made.task.held_out(PROMPTS)
    found: list[dict[str, Any]] = []
    async for batch in batches(made, pace):
        version = batch.version
        if version % EVERY:
            step(made, pace, batch)
        else:
            found.append({"version": version, **_measured_step(made, pace, variants, batch, prompts)})
        await made.swap(version + 1)
    accuracy = await world.accuracy(made)
    await made.engine.stop()
    return {"accuracy": accuracy, "measured": found}


def _measured_step(
    made: world.World, pace: Fixed, variants: Mapping[str, Config], batch: PaddedBatch, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Measure before the update on `batch`, make it, and measure what it did."""
    right = right_answers(made, prompts, batch.version)
    before = _measure_signs(made, variants, batch, right)
    with torch.no_grad():
        before_B = probabilities(made, batch)
    metrics = step(made, pace, batch).metrics
    about = {name: metrics[name] for name in ABOUT if name in metrics}
    return {**before, **_moved(made, batch, before_B, right, before["expected"]), **about}


def _measure_signs(
    made: world.World, variants: Mapping[str, Config], batch: PaddedBatch, right: PaddedBatch
) -> dict[str, Any]:
    expected = probabilities(made, right).mean()
    expected.backward()
    exact, found = _gradient(made), dict[str, Any](expected=expected.item())
    for name, variant in variants.items():
        signs = by_sign(made, variant, batch)
        found |= {name: products(signs.positive, signs.negative, exact), "share": signs.share}
    return found


@torch.no_grad()
def _moved(
    made: world.World, batch: PaddedBatch, before_B: Tensor, right: PaddedBatch, expected: float
) -> dict[str, float | None]:
    """What the update did: to the mean p(response) of the batch's right and wrong responses, and to J."""
    moved_B, is_right_B = probabilities(made, batch) - before_B, batch.reward_B > 0
    found: dict[str, float | None] = {"gained": float(probabilities(made, right).mean()) - expected}
    for name, rows_B in (("right", is_right_B), ("wrong", ~is_right_B)):
        found[f"p_{name}"] = float(before_B[rows_B].mean()) if rows_B.any() else None
        found[f"moved_{name}"] = float(moved_B[rows_B].mean()) if rows_B.any() else None
    return found


def summed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line for each task, lag and correction: medians over the seeds of each run's medians."""
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["task"], row["lag"]].append(row)
    lines: list[dict[str, Any]] = []
    for (task, lag), some in sorted(groups.items()):
        for name in CORRECTIONS:
            lines.append({"task": task, "lag": lag, "correction": name, "seeds": len(some)})
            for column, number in _columns(name).items():
                each = [statistics.median(map(number, _with_both(row, name))) for row in some]
                lines[-1][column] = statistics.median(each)
    return lines


def _with_both(row: Row, name: str) -> list[Mapping[str, Any]]:
    """The measurements with advantages of both signs: before the critic has learned, all may have one."""
    return [one for one in row["measured"] if one[name]["pp"] > 0 and one[name]["nn"] > 0]


def _columns(name: str) -> dict[str, Callable[[Mapping[str, Any]], float]]:
    """The numbers of one measurement with the correction `name`, by the table's columns."""
    return {
        "cos positive": lambda one: one[name]["pj"] / math.sqrt(one[name]["pp"] * one[name]["jj"]),
        "cos negative": lambda one: one[name]["nj"] / math.sqrt(one[name]["nn"] * one[name]["jj"]),
        "negative/positive": lambda one: math.sqrt(one[name]["nn"] / one[name]["pp"]),
        "cos at 1": lambda one: cosine(one[name], 1.0),
        "cos at 0.25": lambda one: cosine(one[name], 0.25),
        "cos at share": lambda one: cosine(one[name], one["share"]),
        "cos at equal": lambda one: cosine(one[name], min(1.0, math.sqrt(one[name]["pp"] / one[name]["nn"]))),
        "cos at best": lambda one: cosine(one[name], best_weight(one[name])),
        "best weight": lambda one: best_weight(one[name]),
        "share": lambda one: one["share"],
    }


def judge(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts on `GOALS`."""
    found = {(line["task"], line["lag"], line["correction"]): line for line in lines}
    measured: dict[str, list[float]] = {name: [] for name in GOALS}
    for name, lag in (("fresh", 0), ("old", 16)):
        if line := found.get(("add", lag, "truncate")):
            measured[name].append(line["cos negative"] / line["cos positive"])
    for name, task in (("weight", "add"), ("easy", "sort")):
        if line := found.get((task, 16, "topr")):
            measured[name].append(line["best weight"])
    return [goal.verdict(*measured[name]) for name, goal in GOALS.items()]


def main() -> None:
    """Measure the chosen cases in this process; print and write the results."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    with tempfile.TemporaryDirectory() as folder:
        world.alone(Path(folder))
        for seed, task, lag, rule in product(options.seeds, options.tasks, options.lags, options.rules):
            case = negatives.Case(task, rule, lag, seed)
            key = {**case._asdict(), "updates": options.updates}
            row = campaign.row(key, partial(_measured, case, options.updates, Path(folder)))
            print(task, rule, lag, seed, row["accuracy"], flush=True)
        torch.distributed.destroy_process_group()
    lines = summed(campaign.rows)
    verdicts = judge(lines)
    print(table(lines), *map(told, verdicts), sep="\n")
    if options.json:
        result = {"machine": about, "goals": verdicts, "summary": lines, "runs": campaign.rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _measured(case: negatives.Case, updates: int, folder: Path) -> Mapping[str, Any]:
    rows = folder / f"rows-{case.task}-{case.seed}"
    chosen = [*negatives.write(case.task, rows, case.seed), *negatives.overrides(case, updates, ())]
    config = configfile.load(negatives.CONFIG, chosen)
    variants = {
        name: configfile.load(negatives.CONFIG, [*chosen, f"algorithm.correction={kind}"])
        for name, kind in CORRECTIONS.items()
    }
    model = folder / f"model-{case.task}-{case.seed}"
    if not model.is_dir():
        tiny.make(config, model)
    return asyncio.run(measure(case, config, variants, model))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rules", nargs="+", choices=negatives.RULES, default=["steady"])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2, 8, 16, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6, 7, 8])
    parser.add_argument("--updates", type=int, default=140)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
