"""Prompts skipped by `algorithm.curriculum`: completions sampled until a held-out accuracy, on three tasks of few rows.

    python benchmarks/learning/curriculum.py --json curriculum.json --plot curriculum.png [--tasks add] [--rules keep]
        [--seeds 4 5 6 7 8]

Each run is one process (benchmarks/lib/world.py) with the queue's own rules and `max_lag = 0`: 32 prompts an update
with 8 samples each, about 600 training rows, an epoch of 19 updates. GRPO, with the weight of negative advantages
of configs/math.toml. All runs of a task and a seed begin with the same model.

    add        sums of a number from 10 to 49 and one from 10 to 29: most rows are always right in the end
    sort       four digits in ascending order: easy, soon always right
    mixed      300 rows of `add` and 300 products of two numbers of two digits, which stay wrong; sums are held out

    keep               every prompt is sampled and trained on
    right              prompts of rows whose groups were all right are skipped
    equal              and of those whose groups were all wrong (GRESO)
    resample           groups without a signal are replaced by others (DAPO)
    resample_right     `resample` and `right`

Every 10 updates a run measures its held-out accuracy. Every run is appended to curriculum.jsonl when it ends.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.learning import negatives
from benchmarks.lib import plots, world
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.pace import Fixed, step
from benchmarks.lib.runs import PLAIN, Goal, machine, table, told
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import tiny
from streamppo.queue.rules.curriculum import no_signal_reason
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueState, queue_settings
from streamppo.types import Ticket, Trajectory

EVERY = 10
"""Updates between two evaluations."""
SIZES = ("queue.batch_size=256", "queue.samples_per_prompt=8", "queue.max_lag=0", "evaluation.prompts=256")
TRAINED, HELD_OUT = 600, 256
TASKS: dict[str, tuple[str, ...]] = {
    "add": ("task={kind='arithmetic',first=[10,49],second=[10,29],held_out=0.25}",),
}
"""Each task's overrides of configs/math.toml; the others have rows of their own (`rows`)."""
RESAMPLE, RIGHT = "algorithm.zero_variance=resample", "algorithm.curriculum={}"
RULES: dict[str, tuple[str, ...]] = {
    "keep": (),
    "right": (RIGHT,),
    "equal": ("algorithm.curriculum={skip='equal'}",),
    "resample": (RESAMPLE,),
    "resample_right": (RESAMPLE, RIGHT),
}
TARGETS = {"add": 0.5, "sort": 0.9, "mixed": 0.11}
"""The target held-out accuracy of each task, chosen by runs of `keep` with seed 1."""
PAIRS = {"right": "keep", "equal": "keep", "resample_right": "resample"}
GOALS = {
    **{
        f"{task} {rule}": Goal(f"{task}: completions to {of} with {rule} over {PAIRS[rule]}", most=0.8)
        for (task, of), rule in product(TARGETS.items(), PAIRS)
    },
    **{
        f"end {rule}": Goal(f"accuracy at the end with {rule} less {PAIRS[rule]}, all tasks", least=-0.01)
        for rule in PAIRS
    },
}


class Case(NamedTuple):
    """One run."""

    task: str
    rule: str
    seed: int


def rows(task: str, folder: Path, seed: int) -> str:
    """Write 600 rows for training and about 250 held-out ones; return the override that reads them."""
    draw, hopeless = random.Random(seed), list[tuple[str, str]]()
    if task == "sort":
        every = [(f"{n:04}>", "".join(sorted(f"{n:04}"))) for n in range(10_000)]
        chosen = draw.sample(every, TRAINED + HELD_OUT)
    else:
        sums = [(f"{a}+{b}=", str(a + b)) for a, b in product(range(10, 50), range(10, 30))]
        products = [(f"{a}*{b}=", str(a * b)) for a, b in product(range(10, 100), repeat=2)]
        chosen, hopeless = draw.sample(sums, TRAINED // 2 + HELD_OUT), draw.sample(products, TRAINED // 2)
    trained = chosen[HELD_OUT:] + hopeless
    draw.shuffle(trained)
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in (("held_out", chosen[:HELD_OUT]), ("train", trained)):
        lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in some]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return f"task={{kind='data',data='{folder}/train.jsonl',evaluation='{folder}/held_out.jsonl'}}"


def configure(case: Case, updates: int, folder: Path) -> Config:
    """Return the configuration of a case."""
    of_task = TASKS.get(case.task) or [rows(case.task, folder / f"rows-{case.task}-{case.seed}", case.seed)]
    rule = (*PLAIN, *negatives.RULES["grpo_quarter"], *RULES[case.rule])
    return configfile.load(negatives.CONFIG, [*of_task, *SIZES, f"seed={case.seed}", f"updates={updates}", *rule])


async def measure(config: Config, model: Path) -> Mapping[str, Any]:
    """Sample, update and swap in turns; count the completions before each evaluation."""
    began = time.monotonic()
    made = await world.build(config, model, slots=256, max_total_tokens=config.rollout.max_tokens + 80)
    rules, calls = QueueRules(queue_settings(config), QueueState()), count()
    if rules.curriculum is not None:
        rules.curriculum.map_rows(made.task.row_numbers())
    accuracies, completions, silent = [await world.accuracy(made)], [0], list[float]()
    sampled = 0
    for version in range(config.updates):
        while (batch := rules.take(version)) is None:
            trajectories = await sample(made, rules.issue("world", version, 10_000, next(calls)), version)
            sampled += len(trajectories)
            rules.put(trajectories)
        silent.append(_share_without_signal(batch.trajectories, config))
        step(made, Fixed(0), pad(batch))
        rules.publish(version + 1)
        await made.swap(version + 1)
        if (version + 1) % EVERY == 0:
            accuracies.append(await world.accuracy(made))
            completions.append(sampled)
    await made.engine.stop()
    return {
        "accuracies": accuracies,
        "completions": completions,
        "silent": [round(statistics.fmean(silent[at : at + EVERY]), 4) for at in range(0, len(silent), EVERY)],
        "skipped_prompts": rules.state.counts["skipped_prompts"],
        "resampled": rules.state.dropped["resampled"],
        "seconds": time.monotonic() - began,
    }


async def sample(made: world.World, tickets: Sequence[Ticket], version: int) -> list[Trajectory]:
    """Sample the trajectories of these tickets."""
    trajectories = await world.sampled(made, [ticket.identity.prompt for ticket in tickets], version)
    return [structs.replace(one, identity=ticket.identity) for one, ticket in zip(trajectories, tickets, strict=True)]


def _share_without_signal(trajectories: Sequence[Trajectory], config: Config) -> float:
    size = config.queue.samples_per_prompt
    groups = [trajectories[at : at + size] for at in range(0, len(trajectories), size)]
    return sum(no_signal_reason(group, config.algorithm.resample) is not None for group in groups) / len(groups)


def reached(row: Row) -> int:
    """The completions until two successive evaluations have a mean of at least the target; else all, and one in ten."""
    curve, target = row["accuracies"], TARGETS[row["task"]]
    at = next((at + 1 for at, pair in enumerate(pairwise(curve)) if at and statistics.fmean(pair) >= target), None)
    return row["completions"][at] if at is not None else round(1.1 * row["completions"][-1])


def end(row: Row) -> float:
    """The mean accuracy of the last three evaluations."""
    return statistics.fmean(row["accuracies"][-3:])


def judge(found: Sequence[Row]) -> list[dict[str, Any]]:
    """The verdicts on `GOALS`: medians over the seeds."""
    known = {(row["task"], row["rule"], row["seed"]): row for row in found}
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for (task, rule, seed), row in known.items():
        if rule in PAIRS and (other := known.get((task, PAIRS[rule], seed))):
            measured[f"{task} {rule}"].append(reached(row) / reached(other))
            measured[f"end {rule}"].append(end(row) - end(other))
    return [goal.verdict(*measured[name]) for name, goal in GOALS.items()]


def summed(found: Sequence[Row]) -> list[dict[str, Any]]:
    """One line for each task and rule: medians over the seeds."""
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in found:
        groups[row["task"], row["rule"]].append(row)
    return [
        {
            "task": task,
            "rule": rule,
            "seeds": len(some),
            "completions to target": statistics.median(map(reached, some)),
            "updates": statistics.median(_updates(row) for row in some),
            "end": round(statistics.median(map(end, some)), 3),
            "worst end": round(min(map(end, some)), 3),
            "without signal": round(statistics.median(statistics.fmean(row["silent"]) for row in some), 3),
            "skipped prompts": statistics.median(row["skipped_prompts"] for row in some),
            "completions": statistics.median(row["completions"][-1] for row in some),
        }
        for (task, rule), some in sorted(groups.items())
    ]


def _updates(row: Row) -> int:
    return EVERY * next(
        (at for at, sampled in enumerate(row["completions"]) if sampled >= reached(row)), len(row["completions"])
    )


def plot(found: Sequence[Row], path: Path) -> None:
    """Draw held-out accuracy over sampled completions, a plot for each task: the median of the seeds."""
    names = [task for task in TARGETS if any(row["task"] == task for row in found)]
    with plots.axes(path, len(names), sharey=True) as made:
        for axis, task in zip(made, names, strict=True):
            for rule in RULES:
                some = [row for row in found if (row["task"], row["rule"]) == (task, rule)]
                middle = [
                    statistics.median(column) for column in zip(*(row["accuracies"] for row in some), strict=True)
                ]
                sampled = [
                    statistics.median(column) for column in zip(*(row["completions"] for row in some), strict=True)
                ]
                axis.plot(sampled, middle, label=rule)
            axis.axhline(TARGETS[task], color="gray", linewidth=0.5)
            axis.set(title=task, xlabel="sampled completions", ylim=(0, 1))
        made[0].set(ylabel="held-out accuracy, median of the seeds")
        made[0].legend(fontsize="small")


def main() -> None:
    """Measure the chosen cases in this process; print and write the results."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        world.alone(Path(folder))
        for seed, task, rule in product(options.seeds, options.tasks, options.rules):
            case = Case(task, rule, seed)
            key = {**case._asdict(), "updates": options.updates}
            found.append(campaign.row(key, partial(_measured, case, options.updates, Path(folder))))
            row = found[-1]
            curve = " ".join(f"{one:.2f}" for one in row["accuracies"][:: max(1, len(row["accuracies"]) // 10)])
            print(f"{task} {rule} {seed}: {reached(row)} completions, {row['seconds']:.0f} s, {curve}", flush=True)
        torch.distributed.destroy_process_group()
    lines, verdicts = summed(campaign.rows), judge(campaign.rows)
    print(table(lines), *map(told, verdicts), sep="\n")
    if options.json:
        result = {"machine": about, "goals": verdicts, "summary": lines, "runs": campaign.rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(campaign.rows, options.plot)


def _measured(case: Case, updates: int, folder: Path) -> Mapping[str, Any]:
    config, model = configure(case, updates, folder), folder / f"model-{case.task}-{case.seed}"
    if not model.is_dir():
        tiny.make(config, model)
    return asyncio.run(measure(config, model))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6, 7, 8])
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="of all rows of --json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
