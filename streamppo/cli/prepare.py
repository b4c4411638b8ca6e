"""The commands before a run: init, reward-test, check, doctor, data, plan and completion."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from streamppo.cli.words import ConfigFile, Count, Finite, Override, Positive, RunsFolder, app, refuse_together
from streamppo.commands.start import data as data_sets
from streamppo.config import file as configfile
from streamppo.errors import ConfigError

SPLIT_PATHS = 'COMPREPLY=( $(compgen -f -- "${cur}") )'
WHOLE_PATHS = "IFS=$'\\n' read -r -d '' -a COMPREPLY < <(compgen -f -- \"${cur}\"); compopt -o filenames 2> /dev/null"
"""The bash statement of cyclopts that completes paths but splits paths at spaces, and our replacement of it."""
SAMPLED = 16
"""The number of completions that `reward-test` samples by default."""


@app.command
def init(
    name: Annotated[Path, Parameter(name="NAME", help="The new folder; with --model, the new file NAME.toml.")],
    /,
    *,
    model: Annotated[str, Parameter(help="Your model: a folder or hub name, or builtin:tiny.")] = "",
    data: Annotated[
        str, Parameter(help="Your data, rows with a prompt: jsonl, json, csv, parquet, a folder, a hub name.")
    ] = "",
    reward: Annotated[
        Sequence[str],
        Parameter(
            help="Your reward: FILE.py:FUNCTION, package.module:function, or one of ours: gsm8k, numeric, math, code. "
            "May be repeated: rewards are summed."
        ),
    ] = (),
    gpu: Annotated[Count, Parameter(help="The number of GPUs for SGLang and ranks (default: 0).")] = 0,
    prompt: Annotated[str, Parameter(help="The column of the prompt, if its name is unusual.")] = "",
    answer: Annotated[str, Parameter(help="The column of the answer, if its name is unusual.")] = "",
    column: Annotated[
        Sequence[str], Parameter(help="NAME=COLUMN: what the reward gets as NAME. May be repeated.")
    ] = (),
) -> int:
    """Write a project that is ready to run on a CPU, or a configuration for your model, data and reward.

    With --model, --data and --reward, the sizes in NAME.toml follow from the model and the data.
    """
    from streamppo.commands.start import init as command

    required = {"--model": model, "--data": data, "--reward": reward}
    missing = [option for option, value in required.items() if not value]
    if len(missing) == len(required) and not (gpu or prompt or answer or column):
        return command.init(name)
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"--model, --data and --reward go together: {' and '.join(missing)} {verb} missing")
    columns = dict(pair.split("=", 1) for pair in column if "=" in pair)
    if len(columns) < len(column) or not all((*columns, *columns.values())):
        raise ConfigError(f"--column is NAME=COLUMN with different names, not {' '.join(column)}")
    return command.write_configuration(name, command.UserInputs(model, data, reward, prompt, answer, columns, gpu))


@app.command
def reward_test(
    config: ConfigFile,
    /,
    *overrides: Override,
    n: Annotated[Positive | None, Parameter(help="Completions to sample from the model (default: 16).")] = None,
    completions: Annotated[
        Path | None, Parameter(help="A jsonl file of completions instead, with columns for scorers.")
    ] = None,
) -> int:
    """Score a few completions as a run does, and show rewards, times and errors."""
    given = {"--n": n is not None, "--completions": completions is not None}
    refuse_together("reward-test", given, "all completions of a file are scored")
    loaded = configfile.load(config, overrides)
    from streamppo.commands.start import reward_test as command

    return command.reward_test(loaded, n or SAMPLED, completions)


@app.command
def check(
    config: ConfigFile,
    /,
    *overrides: Override,
    gpu_gib: Annotated[
        Finite | None,
        Parameter(validator=Number(gt=0), help="Memory of one GPU in GiB (default: of this machine's GPU, else 80)."),
    ] = None,
    no_score: Annotated[bool, Parameter(help="Do not call the scorers or the agent on rows of the data.")] = False,
) -> int:
    """Report mistakes in CONFIG, and the resources and memory that its run needs, without starting the run.

    The exit code is 1 if the configuration cannot run.
    """
    loaded = configfile.load(config, overrides)
    from streamppo.commands.checks import check as command

    return command.check(loaded, str(config), gpu_gib, call=not no_score)


@app.command
def doctor(*, runs: RunsFolder = Path("runs")) -> int:
    """Report this machine's hardware and packages, and how to install what is missing.

    The exit code is 1 if no run can be started here.
    """
    from streamppo.commands.start import doctor as command

    return command.doctor(runs)


@app.command
def data(
    name: Annotated[data_sets.Name, Parameter(help="The data set.", show_choices=True)],
    /,
    *,
    folder: Annotated[Path, Parameter(name="--from", help="The folder of the original files.")],
    to: Annotated[Path, Parameter(help="The parquet file to write.")],
    split: Annotated[str, Parameter(help="The split (default: train).")] = "train",
) -> int:
    """Convert the original files of a well-known data set to one parquet file."""
    return data_sets.data(name, folder, to, split)


@app.command
def plan(
    config: Annotated[Path, Parameter(help="A TOML file, or the folder of a run to compare with the prediction.")],
    /,
    *overrides: Override,
    measured: Annotated[
        Sequence[Path],
        Parameter(
            consume_multiple=1,
            help="Runs of half a minute on this machine, with the same model and lengths, whose costs are used.",
        ),
    ] = (),
    gpus: Annotated[Count, Parameter(help="Instead of --measured: a number of GPUs, at least 2.")] = 0,
    gpu: Annotated[str, Parameter(help="With --gpus, their type: a100, h100, h200, b200, l40s (default: h100).")] = "",
    prompt_tokens: Annotated[
        Finite | None, Parameter(validator=Number(gt=0), help="Mean tokens of a prompt, with --gpus.")
    ] = None,
    length: Annotated[
        Finite | None, Parameter(validator=Number(gt=0), help="Mean tokens of a completion, with --gpus.")
    ] = None,
    reward_s: Annotated[
        Finite | None, Parameter(validator=Number(gte=0), help="Seconds of a reward (default: measured, or 0).")
    ] = None,
    price: Annotated[
        Finite | None, Parameter(validator=Number(gte=0), help="Price of a GPU hour, with --gpus.")
    ] = None,
    json: Annotated[Path | None, Parameter(help="Write the numbers to this file.")] = None,
) -> int:
    """Predict updates/s, waits and lag of a run before its start, and propose faster settings."""
    if bool(measured) == bool(gpus):
        options = "one of --measured and --gpus" if not gpus else "--measured or --gpus, not both"
        raise ConfigError(f"plan needs {options}: costs come from runs on this machine or from a type of GPU")
    for option, value in {
        "--gpu": gpu or None,
        "--prompt-tokens": prompt_tokens,
        "--length": length,
        "--price": price,
    }.items():
        if measured and value is not None:
            raise ConfigError(f"{option} is for a plan with --gpus: with --measured, runs give the costs and lengths")
    run = config if config.is_dir() else None
    loaded = configfile.load(configfile.existing(run) / configfile.CONFIG if run else config, overrides)
    from streamppo.commands.plan import plan as command

    assumed = command.Assumed(prompt_tokens, length, reward_s)
    if gpus:
        return command.on_gpus(loaded, command.Hardware(gpus, gpu or "h100", price), assumed, json)
    return command.on_this_machine(loaded, measured, assumed, run, json)


@app.command
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.", show_choices=True)], /
) -> int:
    """Print a shell's completion script for commands, options and paths. docs/commands.md explains the installation."""
    sys.stdout.write(app.generate_completion(shell=shell).replace(SPLIT_PATHS, WHOLE_PATHS))
    return 0
