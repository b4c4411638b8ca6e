"""Checks of each model's files against its configuration, and of an export, without loading weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.commands.checks.folder import OWN_CRITICS, find
from streamppo.config.model import BUILTIN
from streamppo.config.rollout import FAMILIES, EmbeddedEngine, SGLangEngine
from streamppo.config.sections import Config
from streamppo.errors import ModelError
from streamppo.learner.model import hf_files
from streamppo.rollout.embedded import decoder
from streamppo.rollout.weight_checks import Architecture
from streamppo.weights.models import fit, headers
from streamppo.weights.models.fit import Kind
from streamppo.weights.models.settings import settings

READ_MIB = 2048
"""Files up to this size are checked for numbers that are not finite; larger ones are checked when they are loaded."""
REMEDY = "load it with transformers' AutoModelForCausalLM, and save that with save_pretrained beside its tokenizer"
"""For files that are not those of the model which transformers makes of them."""


class NamedModel(NamedTuple):
    """A model of a configuration: the subject of its findings, its path, and its loaded parts."""

    subject: str
    path: str
    kind: Kind = "AutoModelForCausalLM"
    body: bool = False


def findings(config: Config) -> Findings:
    """Compare every model on this machine with its files, and rehearse an export without the policy's weights."""
    is_read = True
    for model in _models(config):
        folder, _ = find(model.path, model.subject)
        if folder is not None and headers.has_weights(Path(folder)):
            finding = _weights(model, Path(folder))
            is_read &= finding.state != "error"
            yield finding
    if config.model.path != BUILTIN and (folder := find(config.model.path, "model")[0]) is not None:
        yield from _export(folder)
        if is_read and isinstance(config.rollout.engine, SGLangEngine):
            yield from _names(folder)
        if is_read and isinstance(config.rollout.engine, EmbeddedEngine):
            yield from _embedded(folder)


def _embedded(folder: str) -> Findings:
    hf_config = settings(folder)
    if hf_config.model_type in FAMILIES and (reason := decoder.refusal(hf_config)):
        yield Finding("engine", "error", f"{folder}: {reason}")


def _models(config: Config) -> Iterator[NamedModel]:
    if config.model.path != BUILTIN:
        yield NamedModel("model", config.model.path)
    if (critic := config.algorithm.critic.model) not in OWN_CRITICS:
        yield NamedModel("critic", critic, body=True)
    if teacher := config.algorithm.teacher.model:
        yield NamedModel("teacher", teacher)
    for name, scorer in config.reward.models().items():
        yield NamedModel(f"reward {name}", scorer.path, "AutoModelForSequenceClassification")


def _weights(model: NamedModel, folder: Path) -> Finding:
    try:
        count = fit.check(
            folder, settings(folder), hf_files.critic_kind(folder) if model.body else model.kind, body=model.body
        )
        mib = sum(file.stat().st_size for file in headers.weight_files(folder)) / 2**20
        name = fit.not_finite(folder) if mib <= READ_MIB else ""
    except ModelError as error:
        return Finding(model.subject, "error", str(error))
    if name:
        return Finding(model.subject, "error", f"{folder}: {name!r} has NaN or infinity, as after a run that diverged")
    values = "all numbers finite" if mib <= READ_MIB else "values are checked when they are loaded"
    return Finding(model.subject, "ok", f"{count} tensors, of the names and shapes of config.json; {values}")


def _export(folder: str) -> Findings:
    try:
        notes = hf_files.rehearse(folder)
    except ModelError as error:
        yield Finding("export", "error", f"the settings next to the weights cannot be saved: {error}")
        return
    yield from (Finding("export", "note", note) for note in notes)
    if not notes:
        yield Finding("export", "ok", "settings, tokenizer and chat template are saved and read back as they are")


def _names(folder: str) -> Findings:
    """Check that a push uses the tensor names of the files, which SGLang expects."""
    try:
        Architecture(settings(folder)).check_names(folder)
    except ModelError as error:
        yield Finding("model", "error", f"{folder}: {error}: {REMEDY}")
