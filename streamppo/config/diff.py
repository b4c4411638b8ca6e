"""Compares the configuration of a run with the configuration that a resume is given, field by field."""

import json
from pathlib import Path

import msgspec
from msgspec import structs

from streamppo.config import file as configfile
from streamppo.config.overrides import covers, leaves
from streamppo.config.sections import Config
from streamppo.config.teacher import SERVER_FIELDS

FIXED = ("model", "algorithm.critic.model", "learner.ranks", "learner.mesh", "queue.shards")
"""Fields and sections that a resume may not change."""
CHANGEABLE = (
    "model.clock",
    "model.float32_head",
    "model.gradient_checkpointing",
    "model.compile",
)
"""Fields inside sections of `FIXED` that a resume may change."""
NOT_LEARNING = (
    "name",
    "reward",
    "environment",
    "rollout",
    "queue",
    "evaluation",
    "checkpoint",
    "archive",
    "cluster",
    "watchdog",
    "telemetry",
    "origin",
    "model.clock",
    "learner.bucket_bytes",
    "learner.deltas",
    "learner.transport",
    "algorithm.teacher.url",
    *(f"algorithm.teacher.{name}" for name in SERVER_FIELDS),
)
"""Fields and sections that do not affect the weights that an update makes from a given batch."""
LEARNING = (
    "reward.correct_at",
    "rollout.max_tokens",
    "rollout.temperature",
    "rollout.engine.routes",
    "queue.batch_size",
    "queue.max_lag",
    "queue.too_old",
)
"""Fields inside sections of `NOT_LEARNING` that affect the weights that an update makes from a given batch."""


def fixed_values(config: Config) -> dict[str, object]:
    """Return the values that a resume may not change, by dotted name."""
    values = {
        name: value
        for name, value in _without_folders(config).items()
        if _is_below(name, FIXED) and not _is_below(name, CHANGEABLE)
    }
    # A teacher at a url scores trajectories before they are queued, so a queue has log-probs for all or for none.
    asks = bool(config.algorithm.teacher.url)
    return values | {"learner.gpus > 0": config.learner.gpus > 0, "teacher at a url": asks}


def fixed_fault(before: Config, after: Config) -> str:
    """Return a sentence about the first of `fixed_values` that has changed; "" if none has changed."""
    was, becomes = fixed_values(before), fixed_values(after)
    for name in (name for name in (*was, *becomes) if was.get(name) != becomes.get(name)):
        return f"a run keeps its {name}: it was {was.get(name)!r}, and cannot become {becomes.get(name)!r}"
    return ""


def learning(config: Config) -> dict[str, object]:
    """Return the values that affect the weights that an update makes from a given batch, by dotted name."""
    values = {
        name: value
        for name, value in _without_folders(config).items()
        if not _is_below(name, NOT_LEARNING) or _is_below(name, LEARNING)
    }
    queue = config.queue
    values |= {"queue.segments.prefix": queue.prefix, "queue.segments.explained": queue.least_explained}
    # `flow_lag` bounds an adaptive lag, which affects the learning rate.
    values["queue.flow_lag"] = None if queue.first_lag is None else queue.flow_lag
    # A rank computes the same results on a share of a GPU as on a whole GPU.
    return values | {"learner.gpus": config.learner.gpus > 0}


def differ(before: Config, after: Config) -> bool:
    """Return True if any value differs. The run's name, its origin, and the folders of its files do not count."""
    was, becomes = _without_folders(before), _without_folders(after)
    return any(was.get(name) != becomes.get(name) for name in was | becomes if not _is_below(name, ("name", "origin")))


def fields(config: Config) -> dict[str, object]:
    """Return every value of `config` by dotted name, including each `kind`."""
    return dict(leaves(msgspec.to_builtins(config)))


def describe_changes(before: Config, after: Config) -> list[str]:
    """Return a line for every changed value: "learner.lr: 0.001 -> 0.0003"."""
    was, becomes = fields(before), fields(after)
    names = [name for name in dict.fromkeys((*was, *becomes)) if was.get(name) != becomes.get(name)]
    return [f"{name}: {_text(was, name)} -> {_text(becomes, name)}" for name in names]


def moved_paths(before: Config, after: Config) -> dict[str, str]:
    """Return the paths in `after`, by dotted name, that differ from the paths in `before` only in the folder."""
    was, becomes = fields(before), fields(after)
    return {
        name: value
        for name, value in becomes.items()
        if isinstance(value, str) and was.get(name) != value and _name(was.get(name)) == _name(value)
    }


def as_present(recorded: Config, present: Config) -> Config:
    """Return `recorded` with the paths, addresses and transport of `present`, which do not affect the weights."""
    if not differ(recorded, present):
        return present
    places = [f"{name}={msgspec.json.encode(place).decode()}" for name, place in moved_paths(recorded, present).items()]
    config = configfile.change(recorded, places)
    learner = structs.replace(
        config.learner,
        bucket_bytes=present.learner.bucket_bytes,
        deltas=present.learner.deltas,
        transport=present.learner.transport,
    )
    return structs.replace(config, learner=learner, checkpoint=present.checkpoint, cluster=present.cluster)


def _text(values: dict[str, object], name: str) -> str:
    return json.dumps(values[name]) if values.get(name) is not None else "none"


def _without_folders(config: Config) -> dict[str, object]:
    """Return every value by dotted name, with only the last part of each absolute path: files may have been moved."""
    return {name: _name(value) for name, value in fields(config).items()}


def _name(value: object) -> object:
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _is_below(name: str, places: tuple[str, ...]) -> bool:
    return any(covers(place, name) for place in places)
