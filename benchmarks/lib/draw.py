"""Draws a random configuration for a short run of the tiny model, from all choices in the configuration's types.

The choices of `[algorithm]` come from the unions and literals of `Algorithm`, and those of tasks and rewards from their
own types; kinds that need more than their name are in the tables below.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from msgspec import inspect

from streamppo.config import file as configfile
from streamppo.config.algorithm import Algorithm
from streamppo.config.task import Task
from streamppo.errors import ConfigError

FIELDS: dict[str, tuple[object, ...]] = {
    "algorithm.correction.floor": (0.0, 0.5),
    "algorithm.correction.level": ("token", "sequence", "geometric"),
    "algorithm.critic.clip": (0.0, 0.2),
    "algorithm.critic.epochs": (0, 2),
    "algorithm.critic.huber": (0.5,),
    "algorithm.critic.lr": (0.0, 1e-3),
    "algorithm.critic.max_grad_norm": (0.0, 1.0),
    "algorithm.critic.minibatches": (0, 2),
    "algorithm.critic.model": ("head", "head", "policy", "scratch"),
    "algorithm.critic.warmup_updates": (0, 0, 3),
    "algorithm.curriculum": ("{}", "{repeat=0.3, floor=0.05}"),
    "algorithm.entropy": (0.0, 0.01),
    "algorithm.entropy_control.target": (0.0, 0.0, 0.5),
    "algorithm.kl.allow_both": ("false", "true"),
    "algorithm.kl.follow_every": (0, 0, 5),
    "algorithm.kl.loss_beta": (0.0, 0.0, 0.02),
    "algorithm.kl.loss_estimator": ("k1", "k2", "k3"),
    "algorithm.kl.offload": ("false", "true"),
    "algorithm.kl.reward_beta": (0.0, 0.0, 0.05),
    "algorithm.kl.reward_estimator": ("k1", "k2", "k3"),
    "algorithm.kl.straight_through": ("false", "true"),
    "algorithm.kl.target": (0.05,),
    "algorithm.negative_weight": (1.0, 1.0, 0.25, 0.0),
    "algorithm.positive_nll": (0.0, 0.0, 0.1),
    "algorithm.resample.mean": ("[0.05, 0.95]",),
    "algorithm.target_kl": (0.0, 0.0, 0.05),
    "algorithm.whiten.over": ("batch", "group", "off"),
    "algorithm.whiten.shift_mean": ("true", "false"),
    "algorithm.whiten.unbiased": ("true", "false"),
    "archive.numbers": ("true", "false"),
    "checkpoint.every": (2, 3),
    "checkpoint.keep": (2, 10),
    "checkpoint.keep_every": (0, 4),
    "learner.bucket_bytes": (2**16, 2**28),
    "learner.decay": ("constant", "linear", "cosine"),
    "learner.deltas": ("auto", "off", "on"),
    "learner.epochs": (1, 2),
    "learner.lr_by_ess": ("off", "on"),
    "learner.max_grad_norm": (1.0, 0.01),
    "learner.micro_batch_tokens": (256, 16384),
    "learner.minibatches": (1, 2, 4),
    "learner.norm": ("2-norm", "max-norm"),
    "learner.offload": ("false", "false", "true"),
    "learner.ranks": (1, 1, 2),
    "learner.threads": (1, 2),
    "learner.warmup_updates": (0, 3),
    "learner.weight_decay": (0.0, 0.1),
    "model.attention": ("auto", "sdpa", "eager"),
    "model.dtype": ("float32", "float32", "bfloat16"),
    "model.float32_head": ("true", "false"),
    "model.gradient_checkpointing": ("auto", "off", "full", "offloaded"),
    "model.lora": ("{rank=4}",),
    "model.share_prompts": ("true", "false"),
    "queue.ahead": ("as_needed", "max_lag"),
    "queue.max_lag": (0, 1, 2, 4, "{kind='adaptive', at_most=4, ess=0.9}"),
    "queue.samples_per_prompt": (1, 4, 8),
    "queue.segments": (
        "{max_tokens=2, explained=0}",
        "{max_tokens=2, explained=0, prefix='detached'}",
    ),
    "queue.shards": (1, 1, 1, 3),
    "queue.too_old": ("mask", "drop", "wait", "windowed"),
    "rollout.actors": (1, 2),
    "rollout.engine": ("{kind='embedded', kv='keep'}", "{kind='embedded', kv='recompute'}"),
    "rollout.in_flight": (64, 192),
    "rollout.slots": (4, 16, 64),
    "rollout.stop": ("[]", "['7']", "['12']"),
    "rollout.temperature": (1.0, 0.7),
    "rollout.top_k": (0, 4, 8),
    "rollout.top_p": (1.0, 1.0, 0.9),
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
TOGETHER: tuple[tuple[list[str], ...], ...] = (
    ([], [], [], ["queue.too_old=keep", "queue.admission=mean"]),
    (
        [],
        [],
        ["algorithm.correction={kind='off'}", "algorithm.proximal=behavior"],
        ["algorithm.critic.model=policy", "algorithm.proximal=loglinear"],
    ),
)
"""Groups of overrides that are valid only together; one of each row is drawn, before all others."""
LEFT_OUT = {"reasoning_gym", "verifiers"}
"""Tasks that need extra packages."""
SCORER = f"kind='function', function='{ADDITION}'"
SEVERAL = f"reward={{scorers={{right={{{SCORER}}}, again={{{SCORER}, weight=0.5}}}}}}"
"""A reward with the components of the drawn gdpo."""
REWARDS = (
    *(f"reward={{function='{ADDITION}', where='{where}'}}" for where in ("auto", "actor", "process")),
    SEVERAL,
)
CHANGED = 0.8
"""The share of the fields that are drawn; the others keep the configuration's value."""
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


def draw(
    generator: random.Random, config: Path, fixed: Sequence[str], folder: Path, given: Sequence[str] = ()
) -> list[str]:
    """Draw overrides that, after `config`, `given` and `fixed`, give a valid configuration.

    They are drawn one after another in a random order. An override that is invalid together with the earlier ones is
    left out. Fields of `fixed` are not drawn, those of `given` may be. Data and teacher are in `folder`.
    """
    taken = {override.partition("=")[0] for override in fixed}
    kind = generator.choice(sorted(TASKS))
    drawn = [text.replace("DATA", str(folder / DATA)) for text in TASKS[kind]]
    advantage = generator.choice(choices()["advantage"])
    rewards = (SEVERAL,) if "'gdpo'" in advantage else ("reward={}",) if kind == "calculator" else REWARDS
    drawn += [] if "reward" in taken else [generator.choice(rewards)]
    values: dict[str, Sequence[object]] = {
        **{f"algorithm.{name}": [one.partition("=")[2] for one in overrides] for name, overrides in choices().items()},
        **FIELDS,
        "algorithm.advantage": [advantage.partition("=")[2]],
        "algorithm.teacher": [value.replace("TEACHER", str(folder / TEACHER)) for value in TEACHERS],
    }
    names = [name for name in values if name not in taken and generator.random() < CHANGED]
    generator.shuffle(names)
    # A field of a part is drawn after the part.
    names.sort(key=lambda name: name.count("."))
    groups = [generator.choice(together) for together in TOGETHER]
    groups += [[f"{name}={generator.choice(values[name])}"] for name in names]
    for overrides in groups:
        with suppress(ConfigError):
            configfile.load(config, [*given, *fixed, *drawn, *overrides])
            drawn += overrides
    return drawn


def write(folder: Path, config: Path) -> None:
    """Write a data task into `folder`, with additions known to builtin:tiny from its warm-up, and a teacher."""
    from streamppo.learner.model import tiny

    problems = [(first, second) for first in range(10, 100, 3) for second in range(10, 100, 7)]
    rows = [{"prompt": f"{first}+{second}=", "answer": str(first + second)} for first, second in problems]
    folder.mkdir(exist_ok=True)
    (folder / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not (folder / TEACHER).exists():
        tiny.make(configfile.load(config, ["model.tiny.max_steps=3"]), folder / TEACHER)


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
