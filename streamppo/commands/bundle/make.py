"""`streamppo bundle`: writes one update of a run to a file, with which another machine can replay the update.

the checkpoint before it, or a replay of it     weights, optimizer, critic, reference, RNG
the archive                                     the batch
the journal                                     the configuration, the digests before and after
the run's first model                           config.json, tokenizer; weights if the update needs them
"""

import logging
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import transformers
from msgspec import structs
from torch import Tensor

import streamppo
from streamppo import durable
from streamppo.commands import versions
from streamppo.commands.bundle import file
from streamppo.commands.bundle.file import Bundle, Facts
from streamppo.commands.console import echo, log_to_stderr
from streamppo.commands.models import weights
from streamppo.commands.versions import Past
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.algorithm import CRITICS
from streamppo.config.sections import Config, model_path
from streamppo.errors import BundleError, ConfigError, JournalError
from streamppo.learner.checkpoint import distcp, manifest
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.queue.store import archive
from streamppo.terminal import counted
from streamppo.weights.models import loading, tokenizer

MIB = 2**20
log = logging.getLogger(__name__)


class WrittenBundle(NamedTuple):
    """A written bundle: its update, its rows, the bytes of its parts, and the updates replayed to make it."""

    file: Path
    update: int
    rows: int
    bytes: dict[str, int]
    remade: int
    seconds: float


def bundle(run: Path, update: int, to: Path | None, rows: Sequence[int], *, adapter: bool, as_json: bool) -> int:
    """Write the bundle, and print its contents. Raises the errors of `make`."""
    with log_to_stderr():
        result = make(run, update, to, rows, adapter=adapter)
    if as_json:
        echo(msgspec.json.encode({**result._asdict(), "file": str(result.file)}).decode())
        return 0
    replayed = f"{counted(result.remade, 'update')} replayed for it, " if result.remade else ""
    parts = ", ".join(f"{part} {size / MIB:.2f}" for part, size in result.bytes.items())
    counts = f"{counted(result.rows, 'row')}; {replayed}{result.seconds:.1f} s"
    echo(f"{result.file}: update {update - 1} -> {update} of {run.name}, {counts}")
    echo(f"{sum(result.bytes.values()) / MIB:.2f} MiB: {parts}")
    echo(f"replay it: streamppo replay {shlex.quote(str(result.file))}")
    return 0


def make(run: Path, update: int, to: Path | None, rows: Sequence[int], *, adapter: bool) -> WrittenBundle:
    """Write the update that made version `update` of `run` to the file `to`, with `rows` of its batch (empty: all).

    With `adapter`, the frozen weights are omitted. Raises `JournalError` if the update was not made or its batch was
    not kept, `ConfigError` if a bundle cannot hold the update, and `BundleError` if the file cannot be written.
    """
    began = time.perf_counter()
    past = versions.read_past(run, update - 1)
    to = (to or Path(f"{run.name}-{update}.safetensors")).absolute()
    _refuse(past, update, to, adapter=adapter)
    config, batch = past.history.at(past.version), archive.open(run).batch(past.version)
    if unknown := [row for row in rows if row >= len(batch.trajectories)]:
        raise ConfigError(f"--rows {unknown[0]}: the batch has rows 0 to {len(batch.trajectories) - 1}")
    bare = file.without_paths(config)
    count, chosen_rows = len(batch.trajectories), tuple(sorted(set(rows)))
    if chosen_rows:
        batch = structs.replace(batch, trajectories=tuple(batch.trajectories[row] for row in chosen_rows))
    with durable.naming(to, BundleError), durable.scratch_folder(to) as scratch:
        checkpoint = scratch / f"{past.version:08d}" if past.version else None
        begin = versions.make_checkpoint(past, scratch) if past.version else 0
        state, stored = _state(past, checkpoint)
        tensors, start = {new: stored[old] for old in stored if (new := _name(old))}, model_path(config, run)
        first_model = _first_model(config, state, start, adapter=adapter)
        tensors |= {f"model.{name}": tensor for name, tensor in first_model.items()}
        tensors |= {f"files.{name}": content for name, content in _files(start).items()}
        part_sizes = ", ".join(f"{part} {size / MIB:.2f}" for part, size in file.sizes(tensors).items())
        log.info("MiB besides the batch: %s", part_sizes)
        if checkpoint:
            distcp.load(stored, checkpoint, alone=True)
        facts = Facts(
            run=run.name,
            state=state,
            digest="" if chosen_rows else past.digests[update],
            exact=config.learner.exact,
            gpu=config.learner.gpus > 0,
            rows=count,
            kept=chosen_rows,
            software=software(),
            model=bare.model.path,
        )
        sizes = file.write(scratch / to.name, Bundle(facts, configfile.show(bare), batch, tensors))
        durable.rename(scratch / to.name, to)
    consent.give(to, bare)
    return WrittenBundle(to, update, len(batch.trajectories), sizes, past.version - begin, time.perf_counter() - began)


def _refuse(past: Past, update: int, to: Path, *, adapter: bool) -> None:
    config = past.history.at(past.version)
    if update not in past.digests:
        raise JournalError(f"{past.run}: version {update} was never made; the newest is {max(past.digests)}")
    if past.version not in past.archived:
        raise JournalError(f"{past.run}: the batch of update {update} was not kept (archive.keep)")
    if config.algorithm.critic.model not in CRITICS:
        raise ConfigError(f"a bundle has one model, and algorithm.critic.model is {config.algorithm.critic.model!r}")
    if config.algorithm.teacher.model:
        raise ConfigError(f"a bundle has one model, and algorithm.teacher.model is {config.algorithm.teacher.model!r}")
    if not past.version and config.algorithm.critic.pretrain:
        critic = "a critic of algorithm.critic.pretrain, which is in no checkpoint"
        raise ConfigError(f"update 1 begins with {critic}: take --update 2")
    if adapter and config.model.lora is None:
        raise ConfigError("--adapter is for a run with model.lora: this one trains all weights")
    if to.exists() or to.is_symlink():
        raise ConfigError(f"{to}: already exists; choose another --to")
    durable.refuse_output(to, BundleError)


def _state(past: Past, checkpoint: Path | None) -> tuple[CheckpointState, dict[str, Tensor]]:
    if checkpoint is None:
        ranks = past.history.at(0).learner.ranks
        return CheckpointState(version=0, digest=past.digests[0], ranks=ranks, beta=0.0, bad_steps=(0, 0)), {}
    return manifest.read(checkpoint).state, distcp.empty_tensors(checkpoint)


def _name(stored: str) -> str:
    """Return the bundle's name of the checkpoint's tensor `stored`; "" for other ranks' tensors and a GPU's RNG."""
    of_rank_0 = stored.removeprefix("own.rank-0.")
    if of_rank_0 == "rng.cpu":
        return "rng"
    if of_rank_0 != stored:
        return of_rank_0.replace("state.", "optimizer.", 1) if of_rank_0.startswith("state.") else ""
    return "" if stored.startswith("own.") else stored


def _first_model(config: Config, state: CheckpointState, start: str, *, adapter: bool) -> dict[str, Tensor]:
    if adapter:
        return {}
    lora, kl, unchanged = config.model.lora, config.algorithm.kl, weights.untrained_weights(start, config.model.dtype)
    if state.version and lora is None and (not kl.on or state.reference_moved):
        return unchanged
    # Frozen weights have the configured type. Weights of a reference that moves are float32.
    moves = lora is None and (not state.version or kl.follow_every)
    return unchanged | weights.model_weights(start, "float32" if moves else config.model.dtype)


def _files(start: str) -> dict[str, Tensor]:
    folder = loading.fetch(start)
    patterns = ("config.json", "generation_config.json", *tokenizer.FILES)
    paths = {path.name: path for pattern in patterns for path in sorted(folder.glob(pattern))}
    contents = {name: durable.read(path) for name, path in paths.items() if file.FILE.fullmatch(name)}
    return {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in contents.items() if text}


def software() -> dict[str, str]:
    """Return the software and hardware that affect the bits of an update."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {
        "streamppo": streamppo.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()} {device}",
    }
