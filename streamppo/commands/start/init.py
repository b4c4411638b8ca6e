"""`streamppo init`: writes a project that learns to sort letters, or a configuration for a user's model and data."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from streamppo import durable, process
from streamppo.commands.checks.check import check_all
from streamppo.commands.checks.finding import print_findings
from streamppo.commands.console import console, echo
from streamppo.commands.start.project import policy, rows, sizes, text
from streamppo.config import file as configfile
from streamppo.config.reward import FunctionScorer
from streamppo.errors import ConfigError, RunError
from streamppo.tasks import plugins
from streamppo.telemetry import host
from streamppo.terminal import counted, harmless, wrap

LETTERS, LENGTH = "abcdefgh", 4
"""The problems are all strings of `LENGTH` of these letters."""
HELD_OUT = 256
FILES = ("run.toml", "rewards.py", "README.md")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def init(folder: Path) -> int:
    """Write the project to `folder`, which must be new or empty. The folder's name is the run's name.

    Raises `ConfigError` for a folder with files or a name that no run can have, and `RunError` if writing fails.
    """
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a project: take letters, digits, dots, dashes and underscores")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: already exists; name a new folder")
    with durable.naming(folder, RunError):
        if folder.exists():
            # The folder is not replaced: it may be the current folder, or its parent may be read-only.
            _fill(folder, name)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with durable.scratch_folder(folder.absolute()) as scratch:
                _fill(scratch, name)
                durable.rename(scratch, folder.absolute())
    echo(f"{folder}: {', '.join(FILES)} and data/ are written")
    echo(f"begin with: cd {shlex.quote(str(folder))} && streamppo run run.toml")
    return 0


def _fill(folder: Path, name: str) -> None:
    for file in FILES:
        template = (resources.files("streamppo.commands.start") / "project" / file).read_text("utf-8")
        (folder / file).write_text(template.replace("NAME", name), "utf-8")
    texts = ["".join(letters) for letters in product(LETTERS, repeat=LENGTH)]
    shuffled = (texts[int(n)] for n in np.random.default_rng(0).permutation(len(texts)))
    problems = [{"prompt": f"{text}>", "answer": "".join(sorted(text))} for text in shuffled]
    (folder / "data").mkdir()
    _write(folder / "data" / "held_out.jsonl", problems[:HELD_OUT])
    _write(folder / "data" / "train.jsonl", problems[HELD_OUT:])


def _write(path: Path, problems: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))


OURS = {
    "gsm8k": "streamppo.tasks.scorers.maths:gsm8k",
    "numeric": "streamppo.tasks.scorers.maths:numeric",
    "math": "streamppo.tasks.scorers.maths:Math",
    "code": "streamppo.tasks.scorers.code:CodeTests",
}
"""Short names for --reward."""


class UserInputs(NamedTuple):
    """A user's model, data and rewards, and the columns of prompt and answer. "" lets `init` choose the column.

    `columns` are further columns of the data, by the name that the reward uses.
    """

    model: str
    data: str
    rewards: Sequence[str]
    prompt: str = ""
    answer: str = ""
    columns: Mapping[str, str] = MappingProxyType({})
    gpus: int = 0


def write_configuration(file: Path, inputs: UserInputs) -> int:
    """Choose the settings for `inputs`, write them to the configuration `file`, and check it.

    Returns the exit code, 1 if the run could not start here. Raises `ConfigError` if the file exists, or if the model,
    data or reward cannot be used.
    """
    file = file if file.suffix == ".toml" else file.with_name(f"{file.name}.toml")
    if not NAME.fullmatch(file.stem):
        raise ConfigError(f"{file.stem!r} cannot name a run: take letters, digits, dots, dashes and underscores")
    if file.exists():
        raise ConfigError(f"{file}: already exists; choose another name")
    plugins.export_path()
    model = policy.read(inputs.model)
    rewards = [OURS.get(reward, reward) for reward in inputs.rewards]
    scorers = [FunctionScorer(function=reward) for reward in rewards]
    with process.naming_prints():
        rows_read = rows.read(inputs.data, scorers, (inputs.prompt, inputs.answer), model.view(), inputs.columns)
    choices = text.ProjectChoices(
        name=file.stem,
        model=_path_in(file, inputs.model),
        data=_path_in(file, inputs.data),
        rewards=[_function_in(file, reward) for reward in rewards],
        policy=model,
        rows=rows_read,
        sizes=sizes.choose(model, rows_read, inputs.gpus, host.total_mib()),
    )
    with durable.naming(file, RunError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.write(choices), encoding="utf-8")
    return _print_next_steps(file, choices)


def _print_next_steps(file: Path, choices: text.ProjectChoices) -> int:
    model, data, length = choices.policy, choices.rows, choices.sizes.completion
    guess = "" if model.is_known else ", all guessed from its name: it is not on this machine"
    prompt = f"the prompt is {data.prompt!r} (up to {data.longest_prompt} tokens)"
    answer = f"the answer {data.columns.get('answer', data.answer)!r} (up to {data.longest_answer} tokens)"
    _print_line(f"{file}: written for")
    _print_line(f"  model    {model.path}: {model.size}, context {model.context:,}{guess}")
    _print_line(f"  rows     {data.total:,}; {prompt}, {answer if data.answer else 'no column is the answer'}")
    if length.left_out:
        bound = f"{length.max_prompt_tokens} tokens"
        _print_line(f"           {length.left_out:,} prompts are longer than {bound} and are left out")
    _print_line(f"  answers  of up to {length.max_tokens} tokens: {length.reason}")
    findings = check_all(configfile.load(file), None)
    notable = [finding for finding in findings if finding.state not in ("ok", "later")]
    if notable:
        print_findings(notable)
    errors = sum(finding.state == "error" for finding in findings)
    _print_line(f"  check    {counted(errors, 'error')}")
    advice = "correct them, then: streamppo check" if errors else "begin with: streamppo run"
    _print_line(f"{advice} {shlex.quote(str(file))}")
    return 1 if errors else 0


def _print_line(text: str) -> None:
    echo(*wrap(harmless(text), console().width).split("\n"))


def _path_in(file: Path, path: str) -> str:
    """Return `path` relative to the folder of `file` if inside it, else absolute. A hub name is unchanged."""
    if not Path(path).exists():
        return path
    target, folder = Path(path).absolute(), file.absolute().parent
    return str(target.relative_to(folder) if target.is_relative_to(folder) else target)


def _function_in(file: Path, name: str) -> str:
    path, colon, attribute = name.partition(".py:")
    return f"{_path_in(file, f'{path}.py')}:{attribute}" if colon else name
