"""Compare with TRL's GRPOTrainer on the default task: seconds to a held-out accuracy, wall and CPU time of an update.

    python benchmarks/learning/beside_trl.py --json beside.json --plot beside.png [--only equal] [--trl-rules file]
        [--python OTHER/bin/python]

Both sides have the model, problems, held-out problems, batch, learning rate, entropy bonus and reward of
configs/math.toml, and GRPO with one step per update; `default` is our run with the file's own advantages and loss.
Cases:

    equal                 the task's answers, of 2 to 4 tokens
    lognormal, pareto     random lengths as in tails.py (benchmarks/lib/lengths.py), equal on both sides
    reward                a reward that takes a second, awaited for all completions concurrently

TRL first runs a few updates with one and with two threads, with random lengths also in micro-batches. The fastest
setting then runs a whole training for each number of steps per update in `--steps` and each rule in `--trl-rules`:
`plain` is TRL's own, `file` has the weight of negative advantages and Adam's betas of configs/math.toml. All seconds
are counted from the start of the command. TRL's exclude its evaluations; ours include them, because they run
concurrently with training. TRL is stopped at 1.1 * goal * the seconds of our GRPO: the ratio is then a lower bound.
Every run is appended to beside.jsonl when it ends: the same command continues after the stored runs. `--python` is an
interpreter with trl (extra `peers`) and streamppo.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cost import growth
from benchmarks.lib import lengths, plots
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.latency import LATENCY
from benchmarks.lib.runs import PLAIN, Goal, ended, machine, table, told, waiting
from benchmarks.lib.trl_run import Job
from streamppo.telemetry import metrics_file

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
EVERY = 20
"""Updates between two evaluations, on both sides."""
EVALUATED = (f"evaluation={{every={EVERY}, prompts=512}}", "checkpoint.every=0")
"""As many evaluations as TRL makes, also with a slow reward, whose overrides turn them off."""
WARM = 3
"""The first updates, which are left out of the times of an update."""
REWARD_S = 1.0
SPARE = 1.1
"""TRL's time limit is this times the goal times our seconds."""


class Case(NamedTuple):
    """One comparison. `least` is the goal: TRL's seconds over ours. `shape` is the distribution of lengths, if any."""

    least: float
    shape: str = ""
    reward_s: float = 0.0
    overrides: tuple[str, ...] = ()
    grpo: tuple[str, ...] = ()
    """Further overrides of our GRPO, for old data."""


class Way(NamedTuple):
    """One setting of TRL: threads, micro-batches, optimizer steps per update, and one of `TRL_RULES`."""

    threads: int
    parts: int
    steps: int = 1
    rule: str = "plain"

    def __str__(self) -> str:
        steps = f", {self.steps} steps" if self.steps > 1 else ""
        rule = f", rule of the {self.rule}" if self.rule != "plain" else ""
        return f"TRL, {self.threads} threads, {self.parts} parts{steps}{rule}"


def _drawn(shape: str, least: float) -> Case:
    return Case(least, shape, overrides=(*lengths.overrides(shape), "queue.max_lag=4"))


OLD_DATA = ("algorithm.correction.kind=mask", "learner.lr_by_ess=on")
"""For GRPO with the lag of a slow reward."""
CASES = {
    "equal": Case(2.0),
    "lognormal": _drawn("lognormal", 4.0),
    "pareto": _drawn("pareto", 3.0),
    "reward": Case(5.0, reward_s=REWARD_S, overrides=(*waiting(8192), "queue.max_lag=8"), grpo=OLD_DATA),
}
GRPO = "grpo"
"""TRL's algorithm."""
RULES = {GRPO: (*PLAIN, "algorithm.advantage={kind='grpo'}"), "default": ()}
TRL_RULES = {"plain": PLAIN, "file": ()}
LOWER = {
    "reached_s": "seconds to the target",
    "reached_update": "updates to the target",
    "first_update_s": "seconds to the first update",
    "wall_ms": "wall time of an update",
    "cpu_ms": "CPU time of an update",
}
"""Numbers that are better if they are lower."""


def main() -> None:
    """Measure the chosen cases; print and write the table, the verdicts and the numbers in which TRL is better."""
    options = parser().parse_args()
    about, campaign = {**machine(), "trl": _trl(options.python)}, Campaign(options.json)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model, endless = lengths.make_models(CONFIG, Path(folder))
        for name in options.only:
            for row in compare(name, endless if CASES[name].shape else model, options, campaign):
                rows.append(row)
                print(json.dumps(_short(row)), flush=True)
                if options.json:
                    result = {"machine": about, "target": options.target, "goals": judge(rows, options.target)}
                    options.json.write_text(json.dumps({**result, "lost": lost(rows), "runs": rows}, indent=1) + "\n")
    print(table([_short(row) for row in rows]), *map(told, judge(rows, options.target)), *lost(rows), sep="\n")
    if options.plot:
        _plot(rows, options.target, options.plot)


def compare(name: str, model: Path, options: argparse.Namespace, campaign: Campaign) -> Iterator[Row]:
    """Run both sides of one case: yield a row for each of our rules, and for each setting of TRL."""
    case = CASES[name]

    def row(side: str, measure: Callable[[], Mapping[str, Any]]) -> Row:
        about = {"target": options.target, "schedule": options.updates}
        return campaign.row({"case": name, "side": side, **about}, measure)

    limit_s = options.limit_s
    for rule in options.rules:
        made = row(f"streamppo, {rule}", partial(ours, model, case, rule, options))
        if rule == GRPO and made["reached_s"]:
            limit_s = min(limit_s, case.least * made["reached_s"] * SPARE)
        yield made
    tried: dict[Way, Row] = {}
    for way in starmap(Way, product(options.threads, options.parts if case.shape else [1])):
        probe = partial(theirs, model, case, options, way=way, stop_after=options.probe)
        tried[way] = row(f"{way}, {options.probe} updates", probe)
        yield tried[way]
    best = min(tried, key=lambda way: tried[way]["wall_ms"])
    for way in (best._replace(steps=steps, rule=rule) for rule, steps in product(options.trl_rules, options.steps)):
        yield row(f"{way}", partial(_whole, model, case, options, way, limit_s))


def _whole(model: Path, case: Case, options: argparse.Namespace, way: Way, limit_s: float) -> dict[str, Any]:
    """Run TRL until the target; `limit_s` in its row marks a whole training."""
    return {**theirs(model, case, options, way=way, limit_s=limit_s), "limit_s": limit_s}


def judge(rows: Sequence[Mapping[str, Any]], target: float) -> list[dict[str, Any]]:
    """Return the verdict on every goal: TRL's best seconds, or the seconds until it was stopped, over ours."""
    verdicts: list[dict[str, Any]] = []
    for (name, case), rule in product(CASES.items(), RULES):
        goal = Goal(f"{name}: TRL's seconds to held-out {target:g} over ours, {rule}", least=case.least)
        mine, other = _pair(rows, name, rule)
        ratio = None
        if mine and other and mine["reached_s"]:
            ratio = (other["reached_s"] or other["until_s"]) / mine["reached_s"]
        bound = bool(ratio and other and not other["reached_s"])
        # A lower bound below the goal decides nothing.
        known = [] if ratio is None or (bound and ratio < case.least) else [ratio]
        verdicts.append({**goal.verdict(*known), "lower_bound": bound})
    return verdicts


def lost(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for every number in which TRL is better than our run."""
    told_of: list[str] = []
    for name, rule in product(CASES, RULES):
        mine, other = _pair(rows, name, rule)
        for field, words in LOWER.items() if mine and other else ():
            if mine and other and other[field] and not (mine[field] and mine[field] <= other[field]):
                ours_is = "not reached" if mine[field] is None else f"{mine[field]:.4g}"
                told_of.append(f"lost: {name}, {rule}, {words}: {ours_is}, TRL {other[field]:.4g}")
    return told_of


def _pair(
    rows: Sequence[Mapping[str, Any]], name: str, rule: str
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """(our run of a case with a rule, the whole TRL training that reached the target first)."""
    of_case = [row for row in rows if row["case"] == name]
    mine = next((row for row in of_case if row["side"] == f"streamppo, {rule}"), None)
    whole = [row for row in of_case if "limit_s" in row]
    return mine, min(whole, key=lambda row: row["reached_s"] or math.inf, default=None)


def measured(events: Sequence[Mapping[str, Any]], target: float) -> dict[str, Any]:
    """Return the measurements of a training from its updates and evaluations; seconds from the start of the command."""
    walls = {event["update"]: event["wall_s"] for event in events if "update" in event}
    scores = [(event["evaluation"], event["accuracy"]) for event in events if "evaluation" in event]
    reached = next((version for version, accuracy in scores if accuracy is not None and accuracy >= target), None)
    last = max(walls)
    warm = min(WARM, last - 1)
    return {
        "reached_s": walls[max(1, reached)] if reached is not None else None,
        "reached_update": reached,
        "first_update_s": walls[1],
        "updates": last,
        "until_s": walls[last],
        "wall_ms": 1e3 * (walls[last] - walls[warm]) / (last - warm) if last > 1 else None,
        "curve": [(walls[max(1, version)], accuracy) for version, accuracy in scores if version <= last],
    }


def theirs(
    model: Path,
    case: Case,
    options: argparse.Namespace,
    *,
    way: Way,
    stop_after: int = 0,
    limit_s: float = 1e9,
) -> dict[str, Any]:
    """Run TRL in the interpreter `--python`. Exits if it fails."""
    job = Job(
        config=str(CONFIG),
        overrides=TRL_RULES[way.rule],
        model=str(model),
        threads=way.threads,
        parts=way.parts,
        steps=way.steps,
        begin=time.time(),
        shape=case.shape,
        reward_s=case.reward_s,
        updates=options.updates,
        stop_after=stop_after or options.updates,
        evaluate_every=EVERY,
        target=options.target,
        limit_s=limit_s,
    )
    return trained(job, options.python)


def trained(job: Job, python: str) -> dict[str, Any]:
    """Run one training of TRL in the interpreter `python`, and return its measurements. Exits if it fails."""
    path = Path(job.model).parent / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    command = [python, str(Path(__file__).parents[1] / "lib" / "trl_run.py"), str(path)]
    # Libraries that are loaded before torch's number of threads is set would use more.
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    cpu = {event["update"]: event["cpu_s"] for event in events if "update" in event}
    warm = min(WARM, max(cpu) - 1)
    cpu_ms = 1e3 * (cpu[max(cpu)] - cpu[warm]) / (max(cpu) - warm) if len(cpu) > 1 else None
    return {**measured(events, job.target), "cpu_ms": cpu_ms}


def ours(model: Path, case: Case, rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run streamppo until the target, the last update or the time limit. Exits if the run fails."""
    with tempfile.TemporaryDirectory() as runs:
        log, folder = Path(runs) / "log", Path(runs) / "math"
        settings = [f"model.path={model}", *case.overrides, *EVALUATED]
        command = [
            sys.executable,
            "-m",
            "streamppo",
            "run",
            str(CONFIG),
            "--runs",
            runs,
            *RULES[rule],
            *((f"updates={options.updates}", *case.grpo) if rule == GRPO else ()),
            *settings,
        ]
        environment = {**os.environ, LATENCY: str(case.reward_s)}
        begin = time.perf_counter()
        with (
            log.open("w") as output,
            ended(subprocess.Popen(command, stdout=output, stderr=output, env=environment)) as run,
        ):
            before, first = growth.look(run, folder, WARM, name=lambda _: "", read=_cpu_s)
            offset_s = time.perf_counter() - begin - _wall_s(folder, first)
            while run.poll() is None and (
                time.perf_counter() - begin < options.limit_s or growth.made(folder) <= first
            ):
                if _reached(folder, options.target):
                    break
                time.sleep(1.0)
            after, last = growth.look(run, folder, 0, name=lambda _: "", read=_cpu_s)
            if run.poll() or last <= first:
                sys.exit(f"{' '.join(command)}\n{log.read_text()[-4000:]}")
        events = [{**line, "wall_s": line["wall_s"] + offset_s} for line in metrics_file.read(folder)]
    spent = sum(seconds - before.get(key, 0.0) for key, seconds in after.items())
    return {**measured(events, options.target), "cpu_ms": 1e3 * spent / (last - first)}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _wall_s(folder: Path, version: int) -> float:
    return next((line["wall_s"] for line in metrics_file.updates(folder) if line["update"] == version), 0.0)


def _reached(folder: Path, target: float) -> bool:
    """Return True if an evaluation reached the target; parses only the evaluations' lines, which is cheap."""
    text = (folder / metrics_file.METRICS).read_bytes()
    found = [json.loads(line) for line in text.split(b"\n")[:-1] if line.startswith(b'{"evaluation"')]
    return any((line["accuracy"] or 0.0) >= target for line in found)


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("case", "side", "updates", *LOWER)}


def _trl(python: str) -> str:
    """The version of trl in an interpreter. Exits if it has none."""
    code = "from importlib import metadata; print(metadata.version('trl'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} has no trl: pip install 'streamppo[peers]', or name another interpreter with --python")
    return done.stdout.strip()


def parser() -> argparse.ArgumentParser:
    """Define the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    made.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    made.add_argument("--target", type=float, default=0.9, help="held-out accuracy")
    made.add_argument(
        "--updates", type=int, default=1100, help="over which the learning rate of TRL and of our GRPO falls"
    )
    made.add_argument("--limit-s", type=float, default=1200.0, help="seconds of one training at most")
    made.add_argument("--threads", type=int, nargs="+", default=(1, 2), help="of TRL")
    made.add_argument("--steps", type=int, nargs="+", default=(1, 4), help="of TRL an update, in whole trainings")
    made.add_argument("--trl-rules", nargs="+", choices=list(TRL_RULES), default=["plain"], help="of whole trainings")
    made.add_argument("--parts", type=int, nargs="+", default=(1, 8), help="micro-batches of TRL with drawn lengths")
    made.add_argument("--probe", type=int, default=6, help="updates with which the ways of TRL are compared: 2 or more")
    made.add_argument("--python", default=sys.executable, help="an interpreter that has trl and streamppo")
    made.add_argument("--json", type=Path)
    made.add_argument("--plot", type=Path)
    return made


def _plot(rows: Sequence[Mapping[str, Any]], target: float, path: Path) -> None:
    names = list(dict.fromkeys(row["case"] for row in rows))
    with plots.axes(path, len(names)) as axes:
        for axis, name in zip(axes, names, strict=True):
            for row in (row for row in rows if row["case"] == name and not row["side"].endswith("updates")):
                axis.plot(*zip(*row["curve"], strict=True), label=row["side"])
            axis.axhline(target, color="gray", linewidth=0.5)
            axis.set(title=name, xlabel="seconds from the start of the command", ylabel="held-out accuracy")
            axis.legend(fontsize="small")


if __name__ == "__main__":
    main()
