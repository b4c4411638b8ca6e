"""Draws a random configuration for a short run of the tiny model, from all choices in the configuration's types.

The choices of `[algorithm]` come from the unions and literals of `Algorithm`, and those of tasks and rewards from their
own types; kinds that need more than their name are in the tables below. Invalid combinations are drawn again.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from msgspec import inspect

from streamppo.config import file as configfile
from streamppo.config.algorithm import Algorithm
from streamppo.config.task import Task
from streamppo.errors import ConfigError

FIELDS: dict[str, tuple[object, ...]] = {
    "algorithm.critic.model": ("head", "head", "policy", "scratch"),
    "algorithm.critic.warmup_updates": (0, 0, 3),
    "algorithm.entropy_control.target": (0.0, 0.0, 0.5),
    "algorithm.kl.reward_beta": (0.0, 0.0, 0.05),
    "algorithm.kl.loss_beta": (0.0, 0.0, 0.02),
    "algorithm.kl.follow_every": (0, 0, 5),
    "algorithm.positive_nll": (0.0, 0.0, 0.1),
    "algorithm.negative_weight": (1.0, 1.0, 0.25, 0.0),
    "algorithm.target_kl": (0.0, 0.0, 0.05),
    "algorithm.whiten.over": ("batch", "group"),
    "learner.ranks": (1, 1, 2),
    "learner.epochs": (1, 2),
    "learner.minibatches": (1, 2, 4),
    "learner.micro_batch_tokens": (256, 16384),
    "queue.samples_per_prompt": (1, 4, 8),
    "queue.max_lag": (0, 1, 2, 4, "{kind='adaptive', at_most=4, ess=0.9}"),
    "queue.too_old": ("mask", "drop", "wait", "windowed"),
    "queue.shards": (1, 1, 1, 3),
    "rollout.actors": (1, 2),
    "rollout.top_p": (1.0, 1.0, 0.9),
    "rollout.top_k": (0, 0, 8),
}
"""Fields and the values from which each is drawn."""
REQUIRED = {
    "advantage.function": "function='examples/custom_advantage.py:advantage'",
    "advantage.gdpo": "weights={right=1.0, again=0.5}",
    "correction.function": "function='examples/custom_correction.py:weights'",
    "correction.reject": "reject=[{kind='geometric', band=[0.9, 1.1]}]",
    "filters.off_policy_negative": "delta=0.05",
    "policy_loss.function": "function='examples/custom_loss.py:loss'",
    "reject.geometric": "band=[0.9, 1.1]",
    "reject.k3": "at_most=0.05",
    "reject.outlier": "band=[0.01, 100.0]",
    "reject.sequence": "band=[0.1, 10.0]",
    "reject.token": "band=[0.2, 5.0]",
}
"""The required fields of kinds that need more than their name, by field and kind."""
ADDITION = "streamppo.tasks.library.arithmetic:score"
TASKS = {
    "arithmetic": ("task.kind=arithmetic",),
    "calculator": (
        "task.kind=calculator",
        "environment.name=streamppo.tasks.library.calculator:Calculator",
        "environment.max_turns=3",
        "environment.max_tokens=24",
    ),
    "data": ("task={kind='data', sources={data={data='DATA', held_out=0.2}}}",),
}
"""Overrides of each task that needs no extra; `DATA` becomes a file of additions. All use the same characters."""
TEACHERS = (
    "{}",
    "{}",
    "{model='TEACHER', weight=0.1}",
    "{model='TEACHER', weight=0.05, signal='reward'}",
)
"""Values of algorithm.teacher; `TEACHER` becomes the folder of a builtin:tiny."""
ADAPTERS = ([], [], ["model.lora={rank=4}"])
"""Overrides for the trained weights: all weights, or only adapters."""
CURRICULA = ([], [], ["algorithm.curriculum={}"], ["algorithm.curriculum={repeat=0.3, floor=0.05}"])
"""Overrides that skip prompts of rows without a learning signal, or none."""
LEFT_OUT = {"reasoning_gym", "verifiers"}
"""Tasks that need extra packages."""
SCORER = f"kind='function', function='{ADDITION}'"
SEVERAL = f"reward={{scorers={{right={{{SCORER}}}, again={{{SCORER}, weight=0.5}}}}}}"
"""A reward with the components of the drawn gdpo."""
REWARDS = (
    *(f"reward={{function='{ADDITION}', where='{where}'}}" for where in ("auto", "actor", "process")),
    SEVERAL,
)
TRIES = 10_000
DATA, TEACHER = "data.jsonl", "teacher"
"""The names of the file and the folder that `write` makes."""


def choices() -> dict[str, list[str]]:
    """Every choice between kinds or literals in `Algorithm`, as overrides, by the name of its field."""
    found: dict[str, list[str]] = {}
    for field in inspect.type_info(Algorithm).fields:  # pyright: ignore[reportAttributeAccessIssue]
        values = list(_values(field.type, field.encode_name))
        if len(values) > 1:
            found[field.encode_name] = [f"algorithm.{field.encode_name}={value}" for value in values]
    return found


def tasks() -> set[str]:
    """All kinds of task."""
    return {str(kind.__struct_config__.tag) for kind in get_args(Task)}


def draw(generator: random.Random, config: Path, fixed: Sequence[str], folder: Path) -> list[str]:
    """Random overrides that, with `config` and `fixed`, give a valid configuration; data and teacher from `folder`."""
    for _ in range(TRIES):
        kind = generator.choice(sorted(TASKS))
        drawn = [generator.choice(options) for options in choices().values()]
        drawn += [f"{name}={generator.choice(values)}" for name, values in FIELDS.items()]
        drawn += generator.choice(ADAPTERS)
        drawn += generator.choice(CURRICULA)
        drawn += [text.replace("DATA", str(folder / DATA)) for text in TASKS[kind]]
        drawn.append(f"algorithm.teacher={generator.choice(TEACHERS)}".replace("TEACHER", str(folder / TEACHER)))
        drawn.append("reward={}" if kind == "calculator" else generator.choice(REWARDS))
        if any("'gdpo'" in one for one in drawn) and drawn[-1] != SEVERAL:
            continue
        try:
            configfile.load(config, [*fixed, *drawn])
        except ConfigError:
            continue
        return drawn
    raise RuntimeError(f"no valid configuration in {TRIES} tries")


def write(folder: Path, config: Path) -> None:
    """Write a data task into `folder`, with additions known to builtin:tiny from its warm-up, and a teacher."""
    from streamppo.learner.model import tiny

    problems = [(first, second) for first in range(10, 100, 3) for second in range(10, 100, 7)]
    rows = [{"prompt": f"{first}+{second}=", "answer": str(first + second)} for first, second in problems]
    folder.mkdir(exist_ok=True)
    (folder / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not (folder / TEACHER).exists():
        tiny.make(configfile.load(config), folder / TEACHER)


def _values(kind: inspect.Type, field: str) -> Iterator[str]:
    match kind:
        case inspect.UnionType(types=types):
            for one in types:
                yield from _values(one, field)
        case inspect.StructType(tag=tag) if tag is not None:
            parts = ", ".join(filter(None, [f"kind='{tag}'", REQUIRED.get(f"{field}.{tag}")]))
            yield f"{{{parts}}}"
            yield from (f"{{{parts}, {more}}}" for more in _lists(kind))
        case inspect.VarTupleType(item_type=item):
            each = list(_values(item, field))
            yield from (f"[{some}]" for some in ["", *each, ", ".join(each)])
        case inspect.LiteralType(values=values):
            yield from map(str, values)
        case _:
            return


def _lists(kind: inspect.StructType) -> Iterator[str]:
    """For each list field of a kind, an override with all items in the list."""
    for field in kind.fields:
        if isinstance(field.type, inspect.VarTupleType) and not field.required:
            *_, everything = _values(field.type, field.encode_name)
            yield f"{field.encode_name}={everything}"
