"""Replays the update of a bundle in this process with the learner's code, without Ray, an engine or a run."""

import pdb
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from msgspec import structs
from torch import Tensor

from streamppo.commands.bundle import file
from streamppo.commands.bundle.file import Bundle
from streamppo.commands.bundle.tokens import Columns, columns_of
from streamppo.config import consent
from streamppo.config.learner import Mesh, ObjectStore
from streamppo.config.model import JOINED
from streamppo.config.sections import Config
from streamppo.errors import BundleError, ConfigError, StreamppoError
from streamppo.learner import device
from streamppo.learner.batch.fetch import lag_histogram
from streamppo.learner.batch.padded import pad
from streamppo.learner.checkpoint import checkpoint
from streamppo.learner.checkpoint.checkpoint import TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.learner import Learner, build
from streamppo.learner.model import adapters, hf_files, policy
from streamppo.tasks import plugins
from streamppo.types import Batch, ints
from streamppo.weights import buckets
from streamppo.weights.models import fit, loading, settings, tokenizer
from streamppo.weights.models import folder as model_folder

COUNTS = re.compile(r"layer|expert|block|depth")
"""Matches the names of fields of config.json that count modules, such as num_hidden_layers."""
MODULES, MOST_BUFFERS = 1000, 2**30
"""Maximum of a field that `COUNTS` matches (the number of tensors if larger), and of the bytes of all buffers."""
MOST_THREADS, MOST_TEXT = 256, 400


class BundleUpdate(NamedTuple):
    """A replayed update: the new version's digest, the update's metrics, and the numbers of its tokens."""

    digest: str
    metrics: dict[str, float]
    tokens: Columns


def make(
    path: Path, bundle: Bundle, rows: Sequence[int], changes: Sequence[str], *, trust: bool, debug: bool
) -> BundleUpdate:
    """Replay the update of `bundle`, read from `path`, with `changes` to the settings.

    The result has the tokens of `rows`. With `debug` the update starts in pdb. Raises `BundleError` if the file has no
    complete update, and `ConfigError` for invalid changes or for code without the user's consent.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            recorded, config = file.configurations(bundle, Path(folder), changes)
            consent.require(path, [recorded], trust=trust)
            if consent.code(config):
                plugins.export_path()
            model = _model(bundle, recorded, Path(folder) / "model", changes)
            config = _for_one_rank(structs.replace(config, model=structs.replace(config.model, path=model)))
            place = device.acquire(config.learner.gpus, exact=config.learner.exact)
            with device.alone(place):
                return _update(bundle, _learner(bundle, config, model, place), rows, model, debug=debug)
        except ConfigError:
            raise
        except (StreamppoError, *settings.REFUSALS) as error:
            kind = "" if isinstance(error, StreamppoError) else f"{type(error).__name__}: "
            reason = " ".join(str(error).split()).replace(f"{folder}/", "")[:MOST_TEXT]
            raise BundleError(f"{path}: its update cannot be replayed: {kind}{reason}") from error


def _for_one_rank(config: Config) -> Config:
    has_gpu = config.learner.gpus > 0 and torch.cuda.is_available()
    alone = {"ranks": 1, "mesh": Mesh(), "offload": False, "transport": ObjectStore()}
    learner = structs.replace(config.learner, **alone, gpus=float(has_gpu))
    attention = "auto" if config.model.attention in JOINED and not has_gpu else config.model.attention
    return structs.replace(config, learner=learner, model=structs.replace(config.model, attention=attention))


def _learner(bundle: Bundle, config: Config, model: str, place: torch.device) -> Learner:
    def restore(trained: TrainState) -> CheckpointState:
        if bundle.facts.state.version:
            checkpoint.restore(trained, bundle.tensors)
        return bundle.facts.state

    torch.set_num_threads(min(config.learner.thread_count, MOST_THREADS))
    learner = build(config, model, device.mesh_of(place.type, Mesh()), _publish_nothing, None, restore=restore)
    if (digest := digest_of(learner)) != bundle.facts.state.digest:
        raise BundleError(
            f"its weights are not those of version {bundle.facts.state.version} ({digest[:12]}, and "
            f"{bundle.facts.state.digest[:12]} in the journal)"
        )
    return learner


def _update(bundle: Bundle, learner: Learner, rows: Sequence[int], model: str, *, debug: bool) -> BundleUpdate:
    _verify_tokens(bundle.batch, learner)
    batch, make_update = pad(bundle.batch), learner.updater.update
    lags, on_device = lag_histogram(batch), batch.to(learner.updater.device)
    scheduled = learner.follow_schedule(lags)
    with device.naming_errors():
        updated = pdb.Pdb().runcall(make_update, on_device) if debug else make_update(on_device)
    if updated is None:
        raise BundleError("its update was ended in the debugger")
    tokens = columns_of(learner.config, bundle.batch, updated, rows, model)
    metrics = learner.metrics(updated)
    metrics |= learner.adapt(updated, metrics, lags, scheduled)
    return BundleUpdate(digest_of(learner), metrics, tokens)


def _publish_nothing(*_: object) -> NoReturn:
    raise AssertionError("no version is pushed")


def digest_of(learner: Learner) -> str:
    """Return the hash of the policy's weights, computed in the same way as for a push."""
    config, trained = learner.config, learner.policy
    dtype = getattr(torch, config.model.dtype)
    parameters = adapters.adapter_parameters(trained.lm)
    tensors = {name: parameter.detach().to("cpu", dtype) for name, parameter in parameters.items()}
    push, _ = buckets.pack_whole(0, tensors, config.learner.bucket_bytes)
    return structs.replace(push, frozen=policy.frozen(trained, config.model.dtype)).digest


def _model(bundle: Bundle, config: Config, folder: Path, changes: Sequence[str]) -> str:
    """Write the model's folder, and return its path. With adapters alone, return the path of --set model.path."""
    files, weights = bundle.part("files"), bundle.part("policy.lm") | bundle.part("model")
    folders = [change.partition("=")[2] for change in changes if change.startswith("model.path=")]
    if config.model.lora is not None and not bundle.part("model"):
        if not folders:
            raise ConfigError(
                f"the file has only adapters: name the folder of their model, which was {bundle.facts.model!r}, with "
                "--set model.path=FOLDER"
            )
        return folders[-1].strip("\"'")
    if folders:
        raise ConfigError("--set model.path is for a bundle with only adapters: this file has its model")
    folder.mkdir()
    allowed = ("config.json", "generation_config.json", *tokenizer.FILES)
    for name, content in files.items():
        if not any(Path(name).match(pattern) for pattern in allowed):
            raise BundleError(f"{name!r} is no file of a model or tokenizer")
        (folder / name).write_bytes(content.numpy().tobytes())
    _write_weights(folder, weights, len(bundle.tensors))
    return str(folder)


def _write_weights(folder: Path, weights: Mapping[str, Tensor], tensors: int) -> None:
    """Write the model's weights after checking that every size in config.json fits the bundle's tensors."""
    # Counts are checked first, because transformers allocates an entry for each layer of config.json.
    if count := next(_large_counts(model_folder.kind(folder), max(MODULES, tensors)), ""):
        raise BundleError(f"config.json: {count} in a file of {tensors} tensors")
    described = settings.read_settings(folder)
    pairs = [pair for pair in settings.pairs(described) if weights.keys() >= set(pair)]
    untied = any(not torch.equal(weights[head], weights[embedding]) for head, embedding in pairs)
    with torch.device("meta"):
        lm = loading.empty(folder, attention="eager", untied=untied, whole=True)
    for name, parameter in lm.named_parameters():
        if name not in weights or weights[name].shape != parameter.shape:
            shape = list(weights[name].shape) if name in weights else "missing"
            raise BundleError(f"{name!r} is {shape}, but {list(parameter.shape)} in config.json")
    if sum(buffer.nbytes for buffer in lm.buffers()) > MOST_BUFFERS:
        raise BundleError("config.json: the model's buffers are too large")
    lm.load_state_dict(weights, assign=True, strict=False)
    lm.tie_weights()
    with fit.quiet():
        lm.save_pretrained(folder, max_shard_size=hf_files.PART)


def _large_counts(table: Mapping[str, object], most: int) -> Iterator[str]:
    """Yield the fields of a config.json that give a model more than `most` modules of a kind."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _large_counts(value, most)
        elif isinstance(value, int | float) and COUNTS.search(name) and value > most:
            yield f"{name} = {value}"


def _verify_tokens(batch: Batch, learner: Learner) -> None:
    lm = learner.policy.lm
    vocabulary = min(len(lm.get_input_embeddings().weight), len(lm.get_output_embeddings().weight))
    columns = (column for row in batch.trajectories for column in (row.prompt_tokens, row.tokens, row.candidates))
    largest = max(int(ints(column).max(initial=0)) for column in columns)
    if largest >= vocabulary:
        raise BundleError(f"token {largest} is beyond the model's vocabulary of {vocabulary}")
