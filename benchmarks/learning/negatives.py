"""The cost of old data and of negative advantages at full weight, and rules that avoid it, on five tasks.

    python benchmarks/learning/negatives.py --json negatives.json --plot negatives.png [--tasks add sort]
        [--rules plain quarter] [--lags 0 16] [--seeds 4 5 6 7 8]

Each run is one process (benchmarks/lib/world.py): all tokens of the batch of update u are sampled by version u - lag.
All runs of a task and a seed begin with the same model. The learning rate falls linearly to a tenth over the run.

    add       the task of configs/math.toml: sums of two numbers of two digits          1 right answer a prompt
    subtract  the larger of two numbers below 100 minus the other                       1
    sort      four digits in ascending order: easy                                      1
    split     two numbers below 50 with a given sum: "12+25" for "37="                  up to 50
    graded    ciphers.py with answers of 1 to 16 letters; the reward grows with each letter in place    1
    turns     sums with a calculator at hand, over up to three turns                            1, and each by the tool
    arith     reasoning-gym's basic_arithmetic: two numbers below 100 and + - * or /            1
    spell     reasoning-gym's spell_backward, words of three to five letters                    1, dense
    wide      `add` with a model of 5 million parameters, 256 completions an update, rate 2e-4  1

The last four came later; their thresholds are those of the first five, and were set before they ran (`GOALS`).

    plain     gae, weights truncated at 2, one optimizer step per batch
    steps     `plain` with four minibatches
    topr      TOPR's correction, negatives at full weight, four minibatches
    quarter   TOPR's correction, negatives at a quarter, four minibatches
    halves    `quarter` with two minibatches
    steady    `quarter` without whitening, and with Adam's beta2 = 0.999: configs/math.toml
    full      `steady` with negatives at full weight
    grpo      group-relative advantages, one optimizer step per batch, as in TRL
    grpo_quarter   group-relative advantages with the rule `quarter`

Every 20 updates a run measures the held-out accuracy of its weights and of their moving average (decay 0.9 per update),
every 40 updates pass@16 and the mean score of these samples. Every run is appended to negatives.jsonl when it ends.
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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import ciphers, plots, world
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.pace import Fixed, batches, step
from benchmarks.lib.runs import PLAIN, Goal, machine, table, told
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.model import policy, tiny
from streamppo.rollout.engine import Sampling
from streamppo.tasks.library import gym
from streamppo.types import ScoredText

CONFIG = Path("configs/math.toml")
EVERY = 20
"""Updates between two evaluations."""
PASSES_EVERY, SAMPLES = 40, 16
"""Updates between two measurements of pass@16, and samples of a prompt for it."""
AVERAGE = 0.9
GYM = ("reward.function=benchmarks.learning.negatives:score_gym", "reward.where=actor", "rollout.max_tokens=6")
TERMS, WORDS = (f"kind='reasoning_gym',dataset='{name}'" for name in ("basic_arithmetic", "spell_backward"))
TERMS += ",parameters={min_terms=2,max_terms=2,min_digits=1,max_digits=2,allow_parentheses=false,format_style='simple'"
FURTHER = {
    "turns": (
        "task={kind='calculator'}",
        "environment={name='streamppo.tasks.library.calculator:Calculator',max_turns=3,max_tokens=24}",
        "reward={}",
        "rollout.max_tokens=6",
    ),
    "arith": (f"task={{{TERMS}}}}}", *GYM),
    "spell": (f"task={{{WORDS},parameters={{min_word_len=3,max_word_len=5}}}}", *GYM),
    "wide": ("model.tiny.hidden_size=512", "learner.lr=2e-4", "queue.batch_size=256", "evaluation.prompts=256"),
}
"""What the tasks that need no rows of their own have in the place of configs/math.toml's."""
TASKS = ("add", "subtract", "sort", "split", "graded", *FURTHER)
QUARTER = ("algorithm.correction={kind='topr'}", "algorithm.negative_weight=0.25")
GRPO = ("algorithm.advantage={kind='grpo'}",)
FOUR = ("learner.minibatches=4",)
STEADY = ("algorithm.whiten.over=off", "learner.betas=[0.9,0.999]")
RULES = {
    "plain": (),
    "steps": FOUR,
    "topr": (*FOUR, "algorithm.correction={kind='topr'}"),
    "quarter": (*QUARTER, *FOUR),
    "halves": (*QUARTER, "learner.minibatches=2"),
    "steady": (*QUARTER, *FOUR, *STEADY),
    "full": (*FOUR, *STEADY, "algorithm.correction={kind='topr'}", "algorithm.negative_weight=1"),
    "grpo": GRPO,
    "grpo_quarter": (*GRPO, *QUARTER, *FOUR),
}


TARGETS = {"add": 0.9, "subtract": 0.6, "sort": 0.9, "split": 0.9, "graded": 0.5}
TARGETS |= {"turns": 0.9, "arith": 0.4, "spell": 0.4, "wide": 0.9}
"""The target held-out accuracy of each task, chosen by runs with seed 1."""
GOALS = {
    **{
        task: Goal(f"{task}: updates to {of} at lag 16 over those at lag 0, steady", most=1.02)
        for task, of in TARGETS.items()
    },
    "worst": Goal("add and sort: accuracy at the end of the worst run at lag 16, steady", least=0.97),
    "pass": Goal("pass@16 at equal mean score: steady at lag 16 less fresh grpo", least=0.0),
    "entropy": Goal("entropy at equal reward: steady at lag 16 over fresh grpo", least=1.0),
    "plain": Goal("updates to the target: plain at lag 16 over steady at lag 16", least=1.5),
}


class Case(NamedTuple):
    """One run."""

    task: str
    rule: str
    lag: int
    seed: int


async def score_gym(trajectory: ScoredText, dataset: str, parameters: str, entry: str) -> float:
    """Score by reasoning-gym, in this process."""
    return gym.score(trajectory, dataset, parameters, entry)


async def score_split(trajectory: ScoredText, answer: str) -> float:
    """Score 1 for two numbers below 50 with the same sum as in `answer`, else 0."""
    first, plus, second = trajectory.completion.partition("+")
    wanted = sum(int(part) for part in answer.split("+"))
    is_number = bool(plus) and all(part.isascii() and part.isdigit() and len(part) <= 2 for part in (first, second))
    right = is_number and trajectory.finish == "stop" and int(first) + int(second) == wanted
    return float(right and max(int(first), int(second)) < 50)


def write(task: str, folder: Path, seed: int) -> list[str]:
    """Write the rows of a task, and return its overrides of configs/math.toml."""
    if task == "add":
        return []
    if task in FURTHER:
        return [*FURTHER[task]]
    if task == "graded":
        ciphers.write(folder, "lognormal", seed, 3)
        about = [
            "reward.function=benchmarks.lib.ciphers:score",
            "reward.where=actor",
            "rollout.max_tokens=26",
            "task.max_prompt_tokens=72",
        ]
    else:
        draw, rows = random.Random(seed), [*_rows(task)]
        draw.shuffle(rows)
        lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows]
        held_out = min(256, len(lines) // 8)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "held_out.jsonl").write_text("".join(lines[:held_out]))
        (folder / "train.jsonl").write_text("".join(lines[held_out:]))
        own = ["reward.function=benchmarks.learning.negatives:score_split", "reward.where=actor"]
        about = own if task == "split" else []
        about.append("rollout.max_tokens=6")
    rows = f"{{kind='data',data='{folder}/train.jsonl',evaluation='{folder}/held_out.jsonl',max_prompt_tokens=72}}"
    return [f"task={rows}", "algorithm.advantage.bootstrap_truncated=false", *about]


def _rows(task: str) -> Iterator[tuple[str, str]]:
    match task:
        case "subtract":
            yield from ((f"{a}-{b}=", str(a - b)) for a, b in product(range(100), repeat=2) if a >= b)
        case "sort":
            yield from ((f"{n:04}>", "".join(sorted(f"{n:04}"))) for n in range(10_000))
        case _:
            pairs = product(range(50), repeat=2)
            yield from ((f"{a + b}=", f"{a}+{b}") for a, b in pairs)


def overrides(case: Case, updates: int, extra: Sequence[str]) -> list[str]:
    """Return the overrides of a case, besides those of its task."""
    return [f"seed={case.seed}", f"queue.max_lag={case.lag}", f"updates={updates}", *PLAIN, *RULES[case.rule], *extra]


async def measure(case: Case, config: Config, model: Path, device: str) -> Mapping[str, Any]:
    """Sample, update and swap in turns, with as many batches ahead as the lag requires."""
    began, longest = time.monotonic(), config.rollout.max_tokens + 80
    made = await world.build(config, model, slots=256, max_total_tokens=min(longest, 128), device=device)
    pace = Fixed(case.lag)
    average = {name: one.clone() for name, one in _weights(made).items()}
    found: defaultdict[str, list[float]] = defaultdict(list)
    passes = [await _passes(made)]
    raw = [await world.accuracy(made)]
    averaged = [*raw]
    async for batch in batches(made, pace):
        version = batch.version
        metrics = step(made, pace, batch).metrics
        for name in ("reward", "ess", "entropy", "grad_norm", "approx_kl", "length", "truncated", "reward_tool"):
            if name in metrics:
                found[name].append(metrics[name])
        weights = _weights(made)
        for name, one in average.items():
            one.lerp_(weights[name], 1 - AVERAGE)
        await made.swap(version + 1)
        if (version + 1) % EVERY == 0:
            raw.append(await world.accuracy(made))
            averaged.append(await _accuracy_of(made, average, version + 1))
        if (version + 1) % PASSES_EVERY == 0:
            passes.append(await _passes(made))
    await made.engine.stop()
    return {
        "accuracies": raw,
        "averaged": averaged,
        "pass_at_16": [best for best, _ in passes],
        "mean_at_16": [mean for _, mean in passes],
        **{name: _means(some) for name, some in found.items()},
        "seconds": time.monotonic() - began,
    }


def _means(numbers: Sequence[float]) -> list[float]:
    """The mean over each `EVERY` updates."""
    return [round(statistics.fmean(numbers[at : at + EVERY]), 5) for at in range(0, len(numbers), EVERY)]


def _weights(made: world.World) -> dict[str, Tensor]:
    return policy.gather_weights(made.updater.policy, made.config.model.dtype)


async def _accuracy_of(made: world.World, weights: Mapping[str, Tensor], version: int) -> float:
    await made.engine.update_weights(version, {name: one.clone() for name, one in weights.items()})
    accuracy = await world.accuracy(made)
    await made.swap(version)
    return accuracy


async def _passes(made: world.World) -> tuple[float, float]:
    """(pass@16, mean score) of 16 samples for each of 64 held-out prompts."""
    prompts = made.task.held_out(64)
    sampling = Sampling(made.config.rollout.max_tokens, made.config.rollout.temperature)
    scores = await world.scores(made, [prompt for prompt in prompts for _ in range(SAMPLES)], sampling)
    best = [max(scores[at : at + SAMPLES]) == 1.0 for at in range(0, len(scores), SAMPLES)]
    return statistics.fmean(best), statistics.fmean(scores)


def reached(curve: Sequence[float], target: float) -> int | None:
    """The updates until two successive evaluations have a mean of at least `target`; None if no two have."""
    pairs = pairwise(curve[1:])
    return next((EVERY * (at + 2) for at, pair in enumerate(pairs) if statistics.fmean(pair) >= target), None)


def at_level(level: float, levels: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate `values` where `levels`, which rise apart from noise, first cross `level`."""
    for (low, before), (high, after) in pairwise(zip(levels, values, strict=True)):
        if low <= level <= high and high > low:
            return before + (after - before) * (level - low) / (high - low)
    return values[0] if level <= levels[0] else values[-1]


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The verdicts on `GOALS`. A run that misses its target counts as reaching it `EVERY` updates after its end."""
    found = {(row["task"], row["rule"], row["lag"], row["seed"]): row for row in rows if "set" not in row}
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for (task, rule, lag, seed), old in found.items():
        fresh, grpo = found.get((task, rule, 0, seed)), found.get((task, "grpo", 0, seed))
        plain = found.get((task, "plain", lag, seed))
        if (rule, lag) != ("steady", 16):
            continue
        if task in ("add", "sort"):
            measured["worst"].append(old["accuracies"][-1])
        if fresh:
            measured[task].append(_updates_to(old) / _updates_to(fresh))
        if plain:
            measured["plain"].append(_updates_to(plain) / _updates_to(old))
        if grpo:
            score = min(max(old["mean_at_16"]), max(grpo["mean_at_16"]))
            best = [at_level(score, row["mean_at_16"], row["pass_at_16"]) for row in (old, grpo)]
            measured["pass"].append(best[0] - best[1])
            reward = min(max(old["reward"]), max(grpo["reward"]))
            entropies = [at_level(reward, row["reward"], row["entropy"]) for row in (old, grpo)]
            measured["entropy"].append(entropies[0] / entropies[1])
    measured["worst"] = [min(measured["worst"])] if measured["worst"] else []
    return [goal.verdict(*measured[name]) for name, goal in GOALS.items()]


def _updates_to(row: Row) -> int:
    return reached(row["accuracies"], TARGETS[row["task"]]) or row["updates"] + EVERY


def summed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line for each task, rule and lag: medians over the seeds, and the worst seed."""
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["task"], row["rule"], row["lag"], " ".join(row.get("set", ()))].append(row)
    lines: list[dict[str, Any]] = []
    for (task, rule, lag, extra), some in sorted(groups.items()):
        updates, ends = sorted(map(_updates_to, some)), sorted(row["accuracies"][-1] for row in some)
        lines.append(
            {
                "task": task,
                "rule": f"{rule} {extra}".strip(),
                "lag": lag,
                "seeds": len(some),
                "to target": statistics.median(updates),
                "worst": updates[-1],
                "end": statistics.median(ends),
                "worst end": ends[0],
                "averaged": statistics.median(row["averaged"][-1] for row in some),
                "pass@16": statistics.median(row["pass_at_16"][-1] for row in some),
                "entropy": statistics.median(row["entropy"][-1] for row in some),
                "ess": statistics.median(statistics.fmean(row["ess"]) for row in some),
            }
        )
    return lines


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw held-out accuracy over updates, a plot for each task: the median of the seeds, by rule and lag."""
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    colors = {rule: f"C{at}" for at, rule in enumerate(dict.fromkeys(row["rule"] for row in rows))}
    with plots.axes(path, len(tasks), sharey=True) as made:
        for axis, task in zip(made, tasks, strict=True):
            groups: defaultdict[tuple[str, int], list[Sequence[float]]] = defaultdict(list)
            for row in rows:
                if row["task"] == task:
                    groups[row["rule"], row["lag"]].append(row["accuracies"])
            for (rule, lag), curves in groups.items():
                middle = [statistics.median(column) for column in zip(*curves, strict=False)]
                updates = [EVERY * at for at in range(len(middle))]
                axis.plot(updates, middle, "--" if lag == 0 else "-", color=colors[rule], label=f"{rule}, lag {lag}")
            axis.set(title=task, xlabel="updates", ylim=(0, 1))
        made[0].set(ylabel="held-out accuracy, median of the seeds")
        made[0].legend(fontsize="small")


def main() -> None:
    """Measure the chosen cases in this process; print and write the results."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        world.alone(Path(folder), options.device)
        for seed, task, lag, rule in product(options.seeds, options.tasks, options.lags, options.rules):
            case = Case(task, rule, lag, seed)
            key = {**case._asdict(), "updates": options.updates, **({"set": options.set} if options.set else {})}
            rows.append(campaign.row(key, partial(_measured, case, options, Path(folder))))
            print(line(rows[-1]), flush=True)
        torch.distributed.destroy_process_group()
    if options.json:
        lines, verdicts = summed(campaign.rows), judge(campaign.rows)
        print(table(lines), *map(told, verdicts), sep="\n")
        result = {"machine": about, "goals": verdicts, "summary": lines, "runs": campaign.rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        if options.plot:
            plot(campaign.rows, options.plot)


def _measured(case: Case, options: argparse.Namespace, folder: Path) -> Mapping[str, Any]:
    chosen = write(case.task, folder / f"rows-{case.task}-{case.seed}", case.seed)
    config = configfile.load(CONFIG, [*chosen, *overrides(case, options.updates, options.set)])
    model = folder / f"model-{case.task}-{case.seed}"
    if not model.is_dir():
        tiny.make(config, model)
    return asyncio.run(measure(case, config, model, options.device))


def line(row: Row) -> str:
    """One line about a run."""
    raw, averaged, target = row["accuracies"], row["averaged"], TARGETS[row["task"]]
    names = "  ".join(str(row[name]) for name in ("task", "rule", "lag", "seed"))
    to = "/".join(str(reached(curve, target)) for curve in (raw, averaged))
    curve = " ".join(f"{one:.2f}" for one in raw[:: max(1, len(raw) // 10)])
    numbers = {"pass": row["pass_at_16"][-1], "entropy": row["entropy"][-1], "ess": row["ess"][-1]}
    last = "  ".join(f"{name} {number:.3f}" for name, number in numbers.items())
    return f"{names}  to target {to}  end {raw[-1]:.3f}/{averaged[-1]:.3f}  {last}  {row['seconds']:.0f}s  {curve}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6, 7, 8])
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--set", nargs="+", default=[], help="further fields of the configuration")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="of all rows of --json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
