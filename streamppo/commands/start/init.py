"""Begin a project: one that sorts letters and runs at once on a CPU, or a configuration for a user's model, data and
reward.

project/     the files as they are written (NAME in them becomes the project's name), and how a configuration is chosen
"""

import json
import re
import shlex
from collections.abc import Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamppo import durable, process
from streamppo.commands.checks.check import look_over, print_table
from streamppo.commands.checks.machine import memory_mib
from streamppo.commands.console import console, echo
from streamppo.commands.start.project import policy, rows, sizes, text
from streamppo.config import file as configfile
from streamppo.config.reward import FunctionScorer
from streamppo.config.rollout import FAMILIES
from streamppo.errors import ConfigError, RunError
from streamppo.tasks import plugins
from streamppo.terminal import harmless, wrap

LETTERS, LENGTH = "abcdefgh", 4
"""The problems are all texts of this many of these letters."""
HELD_OUT = 256
FILES = ("run.toml", "rewards.py", "README.md")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def init(folder: Path) -> int:
    """Make the project in `folder`, which is new or empty; its name is the folder's.

    Raises `ConfigError` for a folder that has files and for a name that no run can have, and `RunError` if it cannot be
    written.
    """
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name a project: take letters, digits, dots, dashes and underscores")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: already exists; a project begins in a new folder")
    with durable.naming(folder, RunError):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for file in FILES:
            written = (resources.files("streamppo.commands.start") / "project" / file).read_text()
            (folder / file).write_text(written.replace("NAME", name))
        problems = _problems()
        _write(folder / "data" / "held_out.jsonl", problems[:HELD_OUT])
        _write(folder / "data" / "train.jsonl", problems[HELD_OUT:])
    echo(f"{folder}: {', '.join(FILES)} and data/ are there")
    echo(f"begin with: cd {shlex.quote(str(folder))} && streamppo run run.toml")
    return 0


def _problems() -> list[dict[str, str]]:
    """Every problem with its answer, always in the same order."""
    texts = ["".join(letters) for letters in product(LETTERS, repeat=LENGTH)]
    shuffled = (texts[int(n)] for n in np.random.default_rng(0).permutation(len(texts)))
    return [{"prompt": f"{text}>", "answer": "".join(sorted(text))} for text in shuffled]


def _write(path: Path, problems: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))


class UserInputs(NamedTuple):
    """A user's model, data and reward, and the columns of prompt and answer if named."""

    model: str
    data: str
    reward: str
    prompt: str = ""
    answer: str = ""
    gpus: int = 0


def bring(file: Path, given: UserInputs) -> int:
    """Write the configuration `file` for the `given` model, data and reward, choose its sizes, and check it.

    The exit code is 1 if no run can be made of it here. Raises `ConfigError` if the file is there, and for a model,
    rows or a reward that cannot be used.
    """
    file = file if file.suffix == ".toml" else file.with_name(f"{file.name}.toml")
    if not NAME.fullmatch(file.stem):
        raise ConfigError(f"{file.stem!r} cannot name a run: take letters, digits, dots, dashes and underscores")
    if file.exists():
        raise ConfigError(f"{file}: already exists; choose another name")
    plugins.export_path()
    model = policy.look(given.model)
    if not given.gpus and model.family and model.family not in FAMILIES:
        raise ConfigError(
            f"{given.model} is a {model.family}; without a GPU the embedded engine runs {', '.join(FAMILIES)}: choose "
            "such a model, or --gpu 1, where SGLang runs it"
        )
    scorer = FunctionScorer(function=given.reward)
    with process.naming_prints():
        seen = rows.look(given.data, scorer, (given.prompt, given.answer), model.view())
    chosen = text.ProjectChoices(
        name=file.stem,
        model=_from(file, given.model),
        data=_from(file, given.data),
        reward=_function_from(file, given.reward),
        policy=model,
        rows=seen,
        sizes=sizes.choose(model, seen, given.gpus, memory_mib()),
    )
    with durable.naming(file, RunError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.write(chosen), encoding="utf-8")
    return _say_next_steps(file, chosen)


def _say_next_steps(file: Path, chosen: text.ProjectChoices) -> int:
    model, seen, length = chosen.policy, chosen.rows, chosen.sizes.completion
    known = "" if model.is_known else ", all by its name: it is not on this machine"
    answer = f"the answer {seen.answer!r} (up to {seen.longest_answer} tokens)" if seen.answer else "none is an answer"
    _say(f"{file}: written for")
    _say(f"  model    {model.path}: {model.parameters:,} parameters, context {model.context:,}{known}")
    _say(f"  rows     {seen.total:,}; the prompt is {seen.prompt!r} (up to {seen.longest_prompt} tokens), {answer}")
    if length.left_out:
        _say(
            f"           {length.left_out:,} prompts are longer than {length.max_prompt_tokens} tokens and are left out"
        )
    _say(f"  answers  of up to {length.max_tokens} tokens: {length.why}")
    findings = look_over(configfile.load(file), None)
    worth = [finding for finding in findings if finding.state not in ("ok", "later")]
    if worth:
        print_table(worth)
    errors = sum(finding.state == "error" for finding in findings)
    _say(f"  check    {errors} errors")
    quoted = shlex.quote(str(file))
    _say(f"begin with: streamppo run {quoted}" if not errors else f"mend them, then: streamppo check {quoted}")
    return 1 if errors else 0


def _say(text: str) -> None:
    """Print a line, broken between words on a terminal."""
    echo(*wrap(harmless(text), console().width).split("\n"))


def _from(file: Path, path: str) -> str:
    """`path` as it stands in `file`: relative to the file's folder if it is below that, else absolute; names stay."""
    if not Path(path).exists():
        return path
    target, folder = Path(path).absolute(), file.absolute().parent
    return str(target.relative_to(folder) if target.is_relative_to(folder) else target)


def _function_from(file: Path, name: str) -> str:
    path, colon, attribute = name.partition(".py:")
    return f"{_from(file, f'{path}.py')}:{attribute}" if colon else name
