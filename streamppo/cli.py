"""The commands. Torch and Ray are imported only after the arguments and the configuration are known to be right."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamppo import __version__
from streamppo.commands.data import PREPARED, prepare
from streamppo.config import file as configfile
from streamppo.driver import lock
from streamppo.driver.interrupts import Interrupts
from streamppo.errors import CheckpointError, RunError, StreamppoError

STARTED = time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 only if it did all that it was asked for."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse closes the list of overrides at the first flag: `run CONFIG --dry-run a.b=1` leaves one over.
    if unknown := [word for word in rest if word.startswith("-") or "overrides" not in options]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        options.overrides += rest
    try:
        return options.command(options)
    except StreamppoError as error:
        print(f"streamppo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streamppo", description="Asynchronous streaming PPO for language models.")
    parser.add_argument("--version", action="version", version=f"streamppo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_training(commands)
    _add_looking(commands)
    _add_preparing(commands)
    return parser


def _add_training(commands: Any) -> None:
    run = commands.add_parser("run", help="train", description="Train as CONFIG says, with overrides.")
    _add_config(run)
    run.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint of runs/NAME")
    run.add_argument("--runs", type=Path, default=Path("runs"), help="where run folders are made (default: runs)")
    run.set_defaults(command=_run)
    resume = commands.add_parser("resume", help="go on", description="Go on with a run as its configuration says.")
    resume.add_argument("run", type=Path, help="the folder of a run, such as runs/math")
    resume.add_argument("overrides", nargs="*", metavar="section.field=value", help="for example updates=2000")
    resume.set_defaults(command=_resume)
    scale = commands.add_parser(
        "scale",
        help="add or remove rollout actors",
        description="Change the number of rollout actors of a run that goes on. A resumed run has as many.",
    )
    scale.add_argument("run", type=Path, help="the folder of a run")
    scale.add_argument("--rollouts", type=_positive, required=True, metavar="N", help="rollout actors, at least 1")
    scale.set_defaults(command=_scale)


def _add_looking(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="train again from the archive",
        description="Make the run's updates again from its archive, without any engine, and compare the weights. With "
        "--set: what the same batches would have done under another configuration.",
    )
    replay.add_argument("run", type=Path, help="the folder of a run")
    replay.add_argument("--to", type=int, metavar="VERSION", help="the last version to make (default: all)")
    replay.add_argument("--set", nargs="+", default=[], dest="changes", metavar="section.field=value")
    replay.set_defaults(command=_replay)
    inspect = commands.add_parser(
        "inspect", help="show what was trained on", description="Text, tokens, rewards, versions and lag."
    )
    inspect.add_argument("run", type=Path, help="the folder of a run")
    inspect.add_argument("--update", type=int, help="the version that the batch made (default: the newest)")
    inspect.add_argument("--dead-letters", action="store_true", help="what could not be trained on, and why")
    inspect.add_argument("--prompt", type=int, help="what became of every attempt at this prompt")
    inspect.add_argument("--n", type=int, default=4, help="trajectories to show (default: 4)")
    inspect.set_defaults(command=_inspect)


def _add_preparing(commands: Any) -> None:
    trial = commands.add_parser("reward-test", help="try a reward", description="Score a few completions and say how.")
    _add_config(trial)
    trial.add_argument("--n", type=int, default=16, help="completions to sample from the model (default: 16)")
    trial.add_argument("--completions", type=Path, help="a jsonl file of them instead: completion, prompt, columns")
    trial.set_defaults(command=_trial)
    check = commands.add_parser(
        "check",
        help="look a configuration over",
        description="Say what is wrong with CONFIG, what a run of it asks for and about how much memory it takes, "
        "without starting anything. The exit code is 1 if no run can be made of it.",
    )
    _add_config(check)
    check.add_argument("--gpu-gib", type=float, help="memory of one GPU (default: that of the GPU here, else 80)")
    check.set_defaults(command=_check)
    data = commands.add_parser("data", help="prepare a data set", description="Original files to one parquet file.")
    data.add_argument("name", choices=list(PREPARED))
    data.add_argument("--from", dest="folder", type=Path, required=True, help="the folder of the original files")
    data.add_argument("--to", type=Path, required=True, help="the parquet file to write")
    data.add_argument("--split", default="train", help="which split (default: train)")
    data.set_defaults(command=_data)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", type=Path, help="a TOML file, such as configs/math.toml")
    command.add_argument("overrides", nargs="*", metavar="section.field=value", help="for example learner.lr=3e-4")


def _run(options: argparse.Namespace) -> int:
    config = configfile.load(options.config, options.overrides)
    if options.dry_run:
        print(configfile.show(config))
        return 0
    print(f"streamppo {__version__}: {options.config}, {config.updates} updates; starting Ray", flush=True)
    _quiet()
    interrupts = Interrupts()
    from streamppo.run import new_folder, run

    runs = options.runs.resolve()
    folder = _existing(runs / config.name) if options.resume else new_folder(config, runs)
    with lock.driver_lock(folder):
        return run(config, folder, started=STARTED, interrupts=interrupts)


def _resume(options: argparse.Namespace) -> int:
    folder = _existing(options.run.resolve())
    config = configfile.load(folder / configfile.CONFIG, options.overrides)
    _quiet()
    interrupts = Interrupts()
    from streamppo.run import run

    with lock.driver_lock(folder):
        return run(config, folder, started=STARTED, interrupts=interrupts)


def _scale(options: argparse.Namespace) -> int:
    folder = _existing(options.run.resolve())
    before = configfile.load(folder / configfile.CONFIG).rollout.actors
    # What no run may have is told here and not to the run.
    configfile.load(folder / configfile.CONFIG, [f"rollout.actors={options.rollouts}"])
    lock.scale(folder, options.rollouts)
    present = configfile.load(folder / configfile.CONFIG).rollout.actors
    if present != options.rollouts:
        raise RunError(f"{folder}: the run has {present} rollout actors, not {options.rollouts}: its output says why")
    print(f"{options.run}: rollout actors: {present}, before: {before}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    folder = _existing(options.run.resolve())
    _quiet()
    from streamppo.commands.replay import rerun

    return rerun(folder, options.to, options.changes)


def _inspect(options: argparse.Namespace) -> int:
    folder = _existing(options.run.resolve())
    config = configfile.load(folder / configfile.CONFIG)
    _quiet()
    from streamppo.commands.inspect import inspect, inspect_dead_letters, inspect_prompt

    if options.dead_letters:
        return inspect_dead_letters(folder, options.n)
    if options.prompt is not None:
        return inspect_prompt(folder, options.prompt)
    return inspect(config, folder, options.update, options.n)


def _trial(options: argparse.Namespace) -> int:
    config = configfile.load(options.config, options.overrides)
    from streamppo.commands.reward_test import run

    return run(config, options.n, options.completions)


def _check(options: argparse.Namespace) -> int:
    from streamppo.commands.check import run

    return run(options.config, options.overrides, options.gpu_gib)


def _data(options: argparse.Namespace) -> int:
    count = prepare(options.name, options.folder, options.to, options.split)
    print(f"{options.to}: {count} rows")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _existing(folder: Path) -> Path:
    if not (folder / configfile.CONFIG).is_file():
        raise CheckpointError(f"{folder}: no run is there")
    return folder


def _quiet() -> None:
    # The hub client's progress bars and Ray's usage ping have no place in a training log.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
