"""The bias of a cut between segments: the critic's value at the cut against the mean reward of 64 continuations.

    nice python benchmarks/learning/cut_bias.py --json cut-bias.json --plot cut-bias.png [--seeds 1 2 3 4 5]

Completions of the task in benchmarks/lib/ciphers.py (lognormal lengths, 1 to 64 letters, reward at the last token) are
cut at states s_l, drawn from all states with tokens before and after: 200 cuts for each of 5 seeds. The same policy
continues each cut 64 times. The mean reward of the continuations is the truth; its sampling variance is subtracted from
every mean square.

    ours        V(s_l), the critic's value of the state at the cut
    before      V(s_l-1), the assumption of T-PPO (https://arxiv.org/abs/2506.15050)
    waiting     the final reward of the completion itself: no bias, full variance

The error of an advantage d tokens before the cut is (gamma lam)^(d - 1) gamma times the error at the cut; lam is 0.95,
gamma 1. With this lam, waiting uses the lam-return of the rest (`lam-return`), which depends on the critic too.

    untrained   the initial policy and a value head of zeros
    warmed      the same policy after 30 updates of `critic.warmup_updates`, which train only the value head
    trained     policy and critic after a run of 30 updates

Predicted before the first run: `waiting` has a bias of at most 0.03; the trained critic has a bias of at most 0.05, and
at most 0.7 of the error of waiting; its error at the cut is at most 0.95 of its error before it; a warmed critic has a
smaller error than waiting; the bias of an untrained critic is minus the mean reward.

Each policy of a seed is appended to cut-bias.jsonl when it is measured: the same command continues after it.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import ciphers, plots
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.runs import Goal, machine, table, told
from benchmarks.lib.world import World, alone, build, next_batch, reward, sampled
from streamppo.algorithms.advantages import gae
from streamppo.config import file as configfile
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import optimizer, tiny
from streamppo.learner.model.policy import PolicyOutput
from streamppo.rollout.engine import Completion, Sampling
from streamppo.types import Batch, Trajectory

CONFIG = Path(__file__).parent / "ciphers.toml"
CUTS, CONTINUATIONS = 200, 64
COMPLETIONS = 512
"""The number of completions from which the cuts are drawn."""
UPDATES = 30
LAM = 0.95
DISTANCES = (1, 2, 4, 8, 16, 32)
"""Tokens from an advantage to the cut; the last token of the segment is at 1."""
UNSEEN = 1_000_000
"""The number of the first measured prompt; training does not reach it."""
ESTIMATES = ("ours", "before", "waiting", "lam-return")
POLICIES = {"initial": ("untrained", "warmed"), "trained": ("trained",)}
GOALS = {
    "waiting": Goal("bias of waiting", most=0.03),
    "bias": Goal("bias of the trained critic at the cut", most=0.05),
    "trained": Goal("error of the trained critic at the cut over that of waiting", most=0.7),
    "before": Goal("error of the trained critic at the cut over that of the state before", most=0.95),
    "warmed": Goal("error of the warmed critic at the cut over that of waiting", most=1.0),
}
Columns = Mapping[str, Sequence[float]]


class Cut(NamedTuple):
    """Completion `row` after its first `place` tokens."""

    row: int
    place: int


def main() -> None:
    """Measure both policies of the chosen seeds; print and write a table and the verdicts."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    with tempfile.TemporaryDirectory() as folder:
        alone(Path(folder))
        for seed in options.seeds:
            for name in POLICIES:
                campaign.row(
                    {"seed": seed, "policy": name}, partial(_measured, Path(folder), seed, name, options.model)
                )
                print(f"seed {seed}, {name} policy: measured", flush=True)
        dist.destroy_process_group()
    rows = campaign.rows
    lines, verdicts = summary(rows), judge(rows)
    print(table(lines), *map(told, verdicts), sep="\n")
    if options.json:
        result = {"machine": about, "goals": verdicts, "summary": lines, "rows": rows}
        options.json.write_text(json.dumps(result) + "\n")
    if options.plot:
        _plot(rows, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--model", type=Path, help="a folder to keep the model of all seeds in")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


# --- what is measured ------------------------------------------------------------------------------------------


def _measured(folder: Path, seed: int, name: str, model: Path | None) -> Mapping[str, Any]:
    return asyncio.run(_measure(folder, seed, name, model or folder / "model"))


async def _measure(folder: Path, seed: int, name: str, model: Path) -> Mapping[str, Any]:
    """Return the columns of each critic of a policy: one number for every cut."""
    warm_up = UPDATES if name == "initial" else 0
    world = await _world(folder, seed, warm_up, model)
    if name == "trained":
        await _train(world, UPDATES)
    rows = await sampled(world, range(UNSEEN, UNSEEN + COMPLETIONS), 0)
    cuts = draw([one.num_tokens for one in rows], CUTS, np.random.default_rng(seed))
    truth = await _truth(world, rows, cuts)
    critics = {POLICIES[name][0]: columns(pad_all(rows), _scored(world, rows), cuts) | truth}
    if warm_up:
        await _train(world, warm_up)
        critics["warmed"] = columns(pad_all(rows), _scored(world, rows), cuts) | truth
    await world.engine.stop()
    accuracy = statistics.fmean(one.reward == 1.0 for one in rows)
    return {"accuracy": accuracy, "reward": statistics.fmean(one.reward for one in rows), "critics": critics}


async def _world(folder: Path, seed: int, warm_up: int, model: Path) -> World:
    data = folder / "data"
    if not data.exists():
        ciphers.write(data, "lognormal")
    places = [f"task.data={data / 'train.jsonl'}", f"task.evaluation={data / 'held_out.jsonl'}"]
    overrides = [f"seed={seed}", f"updates={UPDATES}", "queue.max_lag=0"]
    config = configfile.load(CONFIG, [*places, *overrides, f"algorithm.critic.warmup_updates={warm_up}"])
    if not model.exists():
        tiny.make(configfile.load(CONFIG, places), model)
    return await build(config, model, slots=256, max_total_tokens=2 * ciphers.LONGEST + 8)


async def _train(world: World, updates: int) -> None:
    """Sample, update and swap in turns, `updates` times."""
    for version in range(updates):
        rows = await next_batch(world, version, version)
        optimizer.follow_schedule(world.updater.optimizer, world.config, version)
        world.updater.update(pad(Batch(version=version, min_version=version, trajectories=tuple(rows))))
        await world.swap(version + 1)


async def _truth(world: World, rows: Sequence[Trajectory], cuts: Sequence[Cut]) -> dict[str, list[float]]:
    """Return the mean reward of each cut's continuations, and the variance of that mean."""
    rewards = await asyncio.gather(*(_continued(world, rows[cut.row], cut.place) for cut in cuts))
    return {
        "mean": [round(statistics.fmean(some), 5) for some in rewards],
        "error": [round(statistics.variance(some) / len(some), 7) for some in rewards],
    }


async def _continued(world: World, row: Trajectory, place: int) -> list[float]:
    """Return the rewards of `CONTINUATIONS` completions that continue the first `place` tokens of `row`."""
    prompt = world.task.prompt(row.identity.prompt)
    before = np.frombuffer(row.tokens, np.int32)[:place]
    whole = np.concatenate([np.frombuffer(row.prompt_tokens, np.int32), before])
    sampling = Sampling(world.config.rollout.max_tokens - place, world.config.rollout.temperature)
    done: list[Completion] = await asyncio.gather(
        *(world.engine.generate(whole, sampling) for _ in range(CONTINUATIONS))
    )
    return [
        await reward(world, prompt, np.concatenate([before, one.tokens]), finished=one.finish == "stop") for one in done
    ]


def pad_all(rows: Sequence[Trajectory]) -> PaddedBatch:
    """Pad completions into one batch."""
    return pad(Batch(version=0, min_version=0, trajectories=tuple(rows)))


@torch.no_grad()
def _scored(world: World, rows: Sequence[Trajectory]) -> PolicyOutput:
    return world.updater.policy(pad_all(rows), "critic")


# --- its arithmetic --------------------------------------------------------------------------------------------


def draw(lengths: Sequence[int], count: int, generator: np.random.Generator) -> list[Cut]:
    """Draw distinct cuts from all states of completions with tokens before and after."""
    running = [Cut(row, place) for row, length in enumerate(lengths) for place in range(1, length)]
    chosen = generator.choice(len(running), size=min(count, len(running)), replace=False)
    return [running[number] for number in sorted(chosen)]


def columns(batch: PaddedBatch, scored: PolicyOutput, cuts: Sequence[Cut]) -> dict[str, list[float]]:
    """All estimates of the reward after each cut, from completions [B, T] and the values before their tokens."""
    nothing_B = torch.zeros_like(scored.bootstrap_B)
    rest = gae(batch.rewards_BT, scored.values_BT, batch.mask_BT, nothing_B, gamma=1.0, lam=LAM).returns
    row, place = (torch.tensor(some) for some in zip(*cuts, strict=True))
    found = {
        "ours": scored.values_BT[row, place],
        "before": scored.values_BT[row, place - 1],
        "waiting": batch.reward_B[row],
        "lam-return": rest[row, place],
    }
    numbers = {name: [round(number, 5) for number in some.tolist()] for name, some in found.items()}
    return {"place": place.tolist(), **numbers}


def bias(found: Columns, estimate: str) -> float:
    """The mean error of an estimate."""
    return statistics.fmean(a - b for a, b in zip(found[estimate], found["mean"], strict=True))


def rmse(found: Columns, estimate: str, least: int = 1) -> float:
    """sqrt(mean((estimate - mean)^2 - error)) over cuts after at least `least` tokens, at least 0.

    `error` is the variance of the truth's mean.
    """
    squares = [
        (guess - mean) ** 2 - error
        for guess, mean, error, place in zip(
            found[estimate], found["mean"], found["error"], found["place"], strict=True
        )
        if place >= least
    ]
    return max(0.0, statistics.fmean(squares)) ** 0.5 if squares else 0.0


def advantage_error(found: Columns, estimate: str, distance: int) -> float:
    """The root mean squared error of advantages `distance` tokens before the cut, in segments that are long enough."""
    return LAM ** (distance - 1) * rmse(found, estimate, distance)


def by_critic(rows: Sequence[Row]) -> dict[str, list[Columns]]:
    """The columns of each critic, one entry for each seed."""
    names = [name for some in POLICIES.values() for name in some]
    return {name: [row["critics"][name] for row in rows if name in row["critics"]] for name in names}


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians over seeds, with minimum and maximum of bias and error."""
    lines: list[dict[str, Any]] = []
    for critic, seeds in by_critic(rows).items():
        for estimate in ESTIMATES if seeds else ():
            biases, errors = ([function(one, estimate) for one in seeds] for function in (bias, rmse))
            line: dict[str, Any] = {"critic": critic, "estimate": estimate}
            for name, some in {"bias": biases, "rmse": errors}.items():
                line |= {name: statistics.median(some), f"{name}_least": min(some), f"{name}_most": max(some)}
            for distance in DISTANCES:
                at = statistics.median(advantage_error(one, estimate, distance) for one in seeds)
                line[f"advantage_{distance}"] = at
            lines.append(line)
    return lines


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The verdict on every goal, with a number for each seed."""
    found = by_critic(rows)

    def ratios(critic: str, other: str) -> list[float]:
        return [rmse(one, "ours") / rmse(one, other) for one in found[critic]]

    measured = {
        "waiting": [abs(bias(one, "waiting")) for some in found.values() for one in some],
        "bias": [abs(bias(one, "ours")) for one in found["trained"]],
        "trained": ratios("trained", "waiting"),
        "before": ratios("trained", "before"),
        "warmed": ratios("warmed", "waiting"),
    }
    return [goal.verdict(*measured[name]) for name, goal in GOALS.items()]


def _plot(rows: Sequence[Row], path: Path) -> None:
    found = by_critic(rows)
    with plots.axes(path, len(found), sharey=True) as made:
        for axis, (critic, seeds) in zip(made, found.items(), strict=True):
            for estimate in ("ours", "before", "lam-return") if seeds else ():
                errors = [[advantage_error(one, estimate, d) for one in seeds] for d in DISTANCES]
                axis.plot(DISTANCES, [statistics.median(some) for some in errors], marker="o", label=estimate)
                axis.fill_between(DISTANCES, [min(some) for some in errors], [max(some) for some in errors], alpha=0.2)
            axis.set(title=f"{critic} critic", xlabel="tokens to the cut", xscale="log")
        made[0].set(ylabel="root mean squared error of the advantage")
        made[0].legend()


if __name__ == "__main__":
    main()
