"""A bundle without a run: an update of the learner tests' model, with moments that depend on a seed."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import learner_case as case
import replay_case
import torch

from streamppo.commands.bundle import file, make, update
from streamppo.commands.bundle.file import Bundle, Facts
from streamppo.config import file as configfile
from streamppo.config.learner import Mesh
from streamppo.learner import device
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.learner import build
from streamppo.queue.store.journal import Journal
from streamppo.types import Identity

VERSION = 3


def bundle(model: Path, *overrides: str) -> Bundle:
    """A bundle of the update from version 3 to 4 of a run of `learner_case.config_of(*overrides)`."""
    config, batch = file.without_paths(case.config_of(f"model.path={model}", *overrides)), case.batch(VERSION)
    with device.alone(torch.device("cpu")):
        learner = build(config, str(model), device.mesh_of("cpu", Mesh()), update._publish_nothing, None)
        digest = update.digest_of(learner)
    torch.manual_seed(1)
    named = {name: one for name, one in learner.policy.named_parameters() if one.requires_grad}
    tensors = {f"policy.{name}": one.detach().clone() for name, one in named.items()}
    for name, one in named.items():
        for moment, kept in learner.optimizer.state[one].items():
            tensors[f"optimizer.{name}.{moment}"] = torch.rand_like(kept) / 100 if kept.dim() else kept + VERSION
    tensors |= {f"files.{name}": one for name, one in make._files(str(model)).items()}
    if config.model.lora is not None or config.algorithm.kl.on:
        tensors |= {f"model.{name}": one for name, one in make.weights.model_weights(str(model), "float32").items()}
    facts = Facts(
        run="math",
        state=CheckpointState(version=VERSION, digest=digest, ranks=1, beta=0.0, bad_steps=(0, 0)),
        digest="",
        exact=True,
        gpu=False,
        rows=len(batch.trajectories),
        software=make.software(),
        model="builtin:tiny",
    )
    return Bundle(facts, configfile.show(config), batch, tensors)


def digest(path: Path, found: Bundle) -> str:
    """The digest of the version that its update makes."""
    return update.make(path, found, (), (), trust=False, debug=False).digest


def identity(**numbers: int) -> Identity:
    """The identity of the first row, with other numbers."""
    return Identity(**{"task": "t", "prompt": 0, "sample": 0, **numbers})


def made_again(run: Path, version: int, to: Path, *options: str) -> dict[str, Any]:
    """Write the bundle of the update that made `version` of a run, make it again, and return what the replay says."""
    done = replay_case.command("streamppo", "bundle", f"{run}", "--update", f"{version}", "--to", f"{to}", *options)
    assert done.returncode == 0, done.stderr
    done = replay_case.command("streamppo", "replay", f"{to}", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    with closing(Journal.open_run(run)) as journal:
        assert told["recorded"] == journal.versions()[version].digest
    assert told["same"] and not told["differences"], told["differences"]
    return told
