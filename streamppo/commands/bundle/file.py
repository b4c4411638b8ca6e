"""Reads and writes the file of a bundle, a safetensors file with tensors and text but no code.

    header        the facts and the batch's words as JSON, the configuration of the update as TOML
    batch.*       the columns of the batch, as in the archive (queue/store/columns.py)
    policy.*      the trained weights before the update, with the critic's; also optimizer.*, reference.* and rng
    model.*       weights of the run's first model that the update needs: under adapters, or of a reference
    files.*       the bytes of config.json and of the tokenizer's files

`read` accepts untrusted files. safetensors checks that the file contains the bytes of every tensor; this module bounds
sizes that are computed from numbers in the file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from msgspec import structs
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamppo import durable
from streamppo.config import file as configfile
from streamppo.config.algorithm import CRITICS
from streamppo.config.reward import FunctionScorer, Reward
from streamppo.config.rollout import EmbeddedEngine, Rollout, SGLangEngine
from streamppo.config.sections import Config
from streamppo.config.task import ArithmeticTask
from streamppo.config.teacher import Teacher
from streamppo.errors import BundleError, ConfigError
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.queue.store import columns
from streamppo.types import Batch, TokenRecord
from streamppo.weights.models.settings import REFUSALS

FILE = re.compile(r"[A-Za-z0-9_.-]+\.(json|txt|model|tiktoken)")
"""Allowed names of the files of a model and tokenizer: no code, no pickles."""
NAME = re.compile(rf"(batch|policy|optimizer|reference|model)\.[A-Za-z0-9_.]+|files\.{FILE.pattern}|rng")
MOST_ENTRIES = 2**26
"""Maximum entries of the padded batch: the number of rows times the tokens of the longest row."""
MOST_STEPS = 10_000
UNUSED_REWARD = FunctionScorer(function="streamppo.tasks.library.arithmetic:score")
"""Replaces a run's scorers, because the batch contains the rewards."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about a bundle: the `state` before the update, and the `digest` of the version after it.

    The run's batch has `rows` rows. If `kept` is not empty, the file has only these rows, and `digest` is empty. A
    replay is bit-identical if the run was `exact`, the `software` is the same, and both or neither use a GPU (`gpu`).
    """

    format: Literal[1] = 1
    run: str
    state: CheckpointState
    digest: str
    exact: bool
    gpu: bool
    rows: int
    kept: tuple[int, ...] = ()
    software: dict[str, str]
    model: str


class Bundle(NamedTuple):
    """An update to replay: facts, the configuration as TOML, the batch, and all other tensors."""

    facts: Facts
    config: str
    batch: Batch
    tensors: Mapping[str, Tensor]

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors named `name.*`, by the rest of their names."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): self.tensors[key] for key in self.tensors if key.startswith(prefix)}


def write(path: Path, bundle: Bundle) -> dict[str, int]:
    """Write the file durably. Returns the bytes of each part, such as batch or policy. Raises `BundleError`."""
    arrays, attributes = columns.batch_columns(bundle.batch, TokenRecord())
    tensors = {**bundle.tensors, **{f"batch.{name}": torch.from_numpy(array.copy()) for name, array in arrays.items()}}
    header = {"bundle": bundle.facts, "batch": attributes}
    metadata = {name: msgspec.json.encode(part).decode() for name, part in header.items()} | {"config": bundle.config}
    with durable.naming(path, BundleError):
        durable.aside(path).unlink(missing_ok=True)
        save_file(tensors, durable.aside(path), metadata)
        durable.settle(path)
    return sizes(tensors)


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of each part."""
    total: dict[str, int] = {}
    for name, tensor in tensors.items():
        part = name.partition(".")[0]
        total[part] = total.get(part, 0) + tensor.nbytes
    return total


def read(path: Path) -> Bundle:
    """Read the bundle at `path`. Raises `BundleError` if the file is not a valid bundle."""
    try:
        # Open only a regular file, because reading a pipe or a device may never end.
        with durable.reading(path), safe_open(path, "pt") as opened:
            header = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        facts = msgspec.json.decode(header["bundle"], type=Facts)
        attributes = msgspec.json.decode(header["batch"], type=columns.Attributes)
        if unknown := [name for name in tensors if not NAME.fullmatch(name)]:
            raise ValueError(f"a tensor {min(unknown)[:100]!r}")
        arrays = {name[6:]: tensors.pop(name).numpy() for name in list(tensors) if name.startswith("batch.")}
        columns.verify(arrays, attributes)
        batch = columns.to_batch(arrays, attributes)
        _verify(facts, batch)
        return Bundle(facts, header["config"], batch, tensors)
    except (*REFUSALS, RecursionError) as error:
        raise BundleError(f"{path}: not a bundle of streamppo: {' '.join(str(error).split())[:300]}") from error


def _verify(facts: Facts, batch: Batch) -> None:
    longest = max(len(row.prompt_tokens) + len(row.tokens) for row in batch.trajectories) // 4
    if len(batch.trajectories) * longest > MOST_ENTRIES:
        raise ValueError(f"{len(batch.trajectories):,} rows of up to {longest:,} tokens: too many to be padded")
    if not 0 <= batch.version == facts.state.version < 2**31 or not -(2**31) <= batch.min_version < 2**31:
        raise ValueError(f"a batch of version {batch.version} with weights of version {facts.state.version}")
    if len(facts.kept or range(facts.rows)) != len(batch.trajectories):
        raise ValueError(f"{len(batch.trajectories)} rows, and its header has a different number")


def configurations(bundle: Bundle, folder: Path, changes: Sequence[str]) -> tuple[Config, Config]:
    """Return the configuration of the update, without and with `changes`. A TOML file is written to `folder`.

    Raises `ConfigError` for invalid changes, and `BundleError` for models outside the bundle or for too many steps.
    """
    text = folder / configfile.CONFIG
    try:
        text.write_text(bundle.config, "utf-8")
        recorded, changed = without_paths(configfile.load(text)), without_paths(configfile.load(text, changes))
    except (ConfigError, ValueError) as error:
        if isinstance(error, ConfigError) and changes:
            raise
        raise BundleError(f"its configuration cannot be read: {error}") from error
    if recorded.algorithm.critic.model not in CRITICS or recorded.algorithm.teacher.model:
        raise BundleError("its configuration names models outside the bundle")
    for config in (recorded, changed):
        learner, critic = config.learner, config.algorithm.critic
        steps = learner.steps + critic.epochs * (critic.minibatches or learner.minibatches)
        if steps > MOST_STEPS:
            raise BundleError(f"{steps:,} optimizer steps in one update: more than {MOST_STEPS:,}")
    return recorded, changed


def without_paths(config: Config) -> Config:
    """Return the part of `config` on which an update depends, without paths and addresses."""
    rollout, algorithm, model = config.rollout, config.algorithm, config.model
    path = Path(model.path).name if model.path.startswith("/") else model.path
    critic, teacher = structs.replace(algorithm.critic, pretrain=""), algorithm.teacher
    if teacher.url:
        fields = {name: getattr(teacher, name) for name in ("weight", "signal", "others")}
        teacher = Teacher(url="http://127.0.0.1:1", **fields)
    engine = SGLangEngine(routes=True) if rollout.engine.routes else EmbeddedEngine()
    return Config(
        name=config.name,
        model=structs.replace(model, path=path, clock="", compile=False),
        task=ArithmeticTask(),
        updates=config.updates,
        seed=config.seed,
        queue=structs.replace(config.queue, shards=1, standby=False),
        algorithm=structs.replace(algorithm, critic=critic, teacher=teacher),
        learner=config.learner,
        reward=Reward(scorers={"reward": UNUSED_REWARD}, correct_at=config.reward.correct_at),
        rollout=Rollout(engine=engine, max_tokens=rollout.max_tokens, temperature=rollout.temperature),
    )
