"""`streamppo check`: what is wrong with a configuration, before anything is started. No Ray, no GPU, no network.

ok         looked at, and as a run needs it
note       works, and could be better
not here   cannot be looked at on this machine: it is absent, which need not be so where the run will be
error      no run can be made of it
"""

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers

from streamppo.commands import memory_estimate as memory
from streamppo.config import file as configfile
from streamppo.config.engine import EmbeddedEngine, SGLangEngine
from streamppo.config.reward import FunctionScorer, JudgeScorer, ModelScorer, Scorer, ServiceScorer
from streamppo.config.sections import BUILTIN, LOCAL, Config, longest_completion, shares_gpus
from streamppo.config.task import DataTask
from streamppo.driver import placement
from streamppo.errors import JournalError, ModelError, StreamppoError, TaskError
from streamppo.learner import tiny
from streamppo.queue import archive
from streamppo.rollout.sglang import wire
from streamppo.tasks import environments, plugins
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards, recognised, shown
from streamppo.tasks.task import Task
from streamppo.tasks.tokenizer import Tokenizer

ROWS = 64
"""Rows of every data set that are read."""
GIB = 2**30
ASSUMED_GIB = 80.0
"""Memory of a GPU where there is none to look at and nobody says."""

State = Literal["ok", "note", "not here", "error"]


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    state: State
    text: str


Findings = Iterator[Finding]


class Gpu(NamedTuple):
    """How much memory a GPU has, and whether that is known or assumed."""

    gib: float
    known: bool


def run(path: Path, overrides: list[str], gpu_gib: float | None) -> int:
    """Print the table and the effective settings; the exit code is 1 if there is an error. Raises `ConfigError`."""
    config = configfile.load(path, overrides)
    plugins.export_path()
    transformers.utils.logging.set_verbosity_error()
    findings = list(_findings(config, _gpu(gpu_gib)))
    print(path)
    for finding in findings:
        print(f"  {finding.what:14} {finding.state:9} {finding.text}")
    print(f"\n{configfile.show(config)}\n")
    errors, absent = (sum(one.state == state for one in findings) for state in ("error", "not here"))
    print(f"{path}: {errors} errors, {absent} things that cannot be looked at here")
    return 1 if errors else 0


def _gpu(gib: float | None) -> Gpu:
    if gib is not None:
        return Gpu(gib, True)
    if torch.cuda.is_available():
        return Gpu(torch.cuda.get_device_properties(0).total_memory / GIB, True)
    return Gpu(ASSUMED_GIB, False)


def _findings(config: Config, gpu: Gpu) -> Findings:
    folder, found = _folder(config.model.path)
    yield found
    yield from _critic(config)
    hf_config = tokenizer = None
    try:
        if config.model.path == BUILTIN:
            hf_config = tiny.settings(config.model)
        elif folder is not None:
            hf_config = transformers.AutoConfig.from_pretrained(folder)
            tokenizer = Tokenizer(folder)
            yield _vocabulary(tokenizer, hf_config)
    except (OSError, ValueError, TaskError) as error:
        yield Finding("model", "error", _first_line(error))
    task = None
    try:
        yield from _absent_data(config)
        task = _task(config, tokenizer)
        if task is not None:
            yield Finding("task", "ok", _prompts(task, tokenizer))
        if task is not None and config.model.path == BUILTIN:
            tiny.answered(task)
    except StreamppoError as error:
        yield Finding("task", "error", str(error))
    yield from _rewards(config, task)
    yield from _environment(config)
    yield from _engine(config)
    yield from _places(config)
    if hf_config is not None:
        yield from _memory(config, hf_config, gpu)


# --- model and data ------------------------------------------------------------------------------------------


def _folder(path: str, what: str = "model") -> tuple[str | None, Finding]:
    """The model's folder if it is on this machine, or in the hub's cache."""
    from huggingface_hub import snapshot_download

    if path == BUILTIN:
        return None, Finding(what, "ok", f"{BUILTIN} is made when the run starts")
    if Path(path).is_dir():
        return path, Finding(what, "ok", path)
    try:
        cached = snapshot_download(path, local_files_only=True)
    except (OSError, ValueError):
        return None, Finding(what, "not here", f"{path!r} is no folder here, and not in the hub's cache")
    return cached, Finding(what, "ok", f"{path}, in the hub's cache")


def _critic(config: Config) -> Findings:
    critic = config.algorithm.critic
    if critic.model not in ("head", "policy", "scratch"):
        yield _folder(critic.model, "critic")[1]
    if not critic.pretrain:
        return
    if not Path(critic.pretrain).is_dir():
        yield Finding("critic", "not here", f"{critic.pretrain!r}, whose batches are to teach it, is no folder here")
        return
    try:
        batches = len(archive.open(Path(critic.pretrain)).versions())
    except JournalError as error:
        yield Finding("critic", "error", str(error))
        return
    if not batches:
        yield Finding("critic", "error", f"{critic.pretrain} has no archived batch to teach it")
        return
    yield Finding("critic", "ok", f"learns from the {batches} batches of {critic.pretrain}")


def _vocabulary(tokenizer: Tokenizer, hf_config: Any) -> Finding:
    has, knows = tokenizer.vocabulary, hf_config.get_text_config().vocab_size
    if has > knows:
        return Finding("tokenizer", "error", f"it writes {has:,} tokens, and the model knows {knows:,}")
    return Finding("tokenizer", "ok", f"{has:,} tokens")


def _absent_data(config: Config) -> Findings:
    for place in _places_of_data(config):
        if not Path(place).exists():
            yield Finding(
                "task", "not here", f"{place!r} is no file or folder here; as a name on the hub it is not asked"
            )


def _places_of_data(config: Config) -> list[str]:
    if not isinstance(config.task, DataTask):
        return []
    return [
        place
        for source in config.task.sources.values()
        for place in (source.data, source.evaluation)
        if place is not None
    ]


def _task(config: Config, tokenizer: Tokenizer | None) -> Task | None:
    """The task on the first rows of its data, if they are here."""
    if all(Path(place).exists() for place in _places_of_data(config)):
        return tasks.build(config.task, config.seed, tokenizer, limit=ROWS)
    return None


def _prompts(task: Task, tokenizer: Tokenizer | None) -> str:
    first = task.training[:ROWS]
    text = f"the first prompt is {first[0].text[:60]!r}"
    if tokenizer is None:
        return text
    return f"{text}; the first {len(first)} have up to {max(len(tokenizer.encode(prompt)) for prompt in first)} tokens"


# --- rewards and environment ---------------------------------------------------------------------------------


def _rewards(config: Config, task: Task | None) -> Findings:
    for name, scorer in config.reward.scorers.items():
        try:
            yield from _scorer(f"reward {name}", scorer, task)
        except TaskError as error:
            yield Finding(f"reward {name}", "error", str(error))
    try:
        for source in sorted(task.sources()) if task is not None else ():
            Rewards(config.reward).of(source)
    except TaskError as error:
        yield Finding("reward", "error", str(error))


def _scorer(what: str, scorer: Scorer, task: Task | None) -> Findings:
    match scorer:
        case FunctionScorer():
            how, in_actor = recognised(scorer)
            for prompt in task.training[:ROWS] if task is not None else ():
                if not scorer.sources or prompt.source in scorer.sources:
                    how.columns(prompt.columns)
            yield Finding(what, "ok", shown(scorer, how, in_actor=in_actor))
        case ModelScorer():
            yield _folder(scorer.path, what)[1]
        case ServiceScorer() | JudgeScorer():
            missing = scorer.key_env and not os.environ.get(scorer.key_env)
            key = f"; the environment has no {scorer.key_env} here" if missing else ""
            yield Finding(what, "not here", f"{scorer.url} is asked when the run starts{key}")


def _environment(config: Config) -> Findings:
    if config.environment is None:
        return
    try:
        environments.load(config.environment)
    except TaskError as error:
        yield Finding("environment", "error", str(error))
        return
    yield Finding("environment", "ok", f"{config.environment.name}, up to {config.environment.max_turns} turns")


# --- engine, places, memory ----------------------------------------------------------------------------------


def _engine(config: Config) -> Findings:
    match config.rollout.engine:
        case EmbeddedEngine():
            yield Finding("engine", "ok", f"embedded, {config.rollout.slots} completions at once in each actor")
        case SGLangEngine(url=url) if url:
            yield Finding("engine", "not here", f"{url} is asked when the run starts")
        case SGLangEngine():
            yield _sglang()


def _sglang() -> Finding:
    try:
        version = wire.installed()
    except ModelError as error:
        absent = isinstance(error.__context__, PackageNotFoundError)
        return Finding("engine", "not here" if absent else "error", str(error))
    return Finding("engine", "ok", f"SGLang {'.'.join(map(str, version))}")


def _places(config: Config) -> Findings:
    plan, here = placement.plan(config), torch.cuda.device_count()
    gpus, cpus = plan.total("GPU"), plan.total("CPU")
    together = ", which share GPUs" if shares_gpus(config) else ""
    what = f"learner ranks ({config.learner.ranks}) and rollout actors ({config.rollout.actors}){together}"
    yield Finding("Ray is asked", "ok", f"GPU {gpus:g}, CPU {cpus:g}: for {what}")
    if gpus > here and config.cluster.address == LOCAL:
        yield Finding("GPUs", "error" if here else "not here", f"{gpus:g} are asked for; this machine has {here}")
    if config.cluster.address == LOCAL and config.cluster.cpus is not None and config.cluster.cpus < cpus:
        yield Finding(
            "CPUs", "error", f"cluster.cpus ({config.cluster.cpus}) is less than the {cpus:g} that are asked for"
        )


def _memory(config: Config, hf_config: Any, gpu: Gpu) -> Findings:
    try:
        model = memory.sizes(hf_config, config.model)
    except ModelError as error:
        yield Finding("memory", "not here", _first_line(error))
        return
    yield Finding("parameters", "ok", f"{model.parameters:,} in {model.layers} layers, {config.model.dtype}")
    allowed, context = _longest(config), hf_config.max_position_embeddings
    longest = min(allowed, context)
    if allowed > context:
        text = f"prompt and completion may have {allowed} tokens; the model takes {context}: completions end there"
        yield Finding("context", "note", text)
    rank, shared = memory.rank(config, model, longest), shares_gpus(config)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in rank._asdict().items() if size)
    yield Finding("rank", "ok", f"about {_gib(rank.total)}: {parts}")
    # An engine starts on the first version, when the learner has all that it keeps.
    free = gpu.gib * GIB - (rank.state + rank.reference if shared else 0)
    engine = memory.engine(config, model, context, free)
    if config.learner.gpus and not shared:
        yield from _fits("rank", rank.total, gpu)
    if engine is not None:
        yield from _cache(engine, longest, gpu)
        neighbours = -(-config.rollout.actors // config.learner.ranks) if shared else 1
        if config.rollout.gpus:
            what = "rank and engine" if shared else "engine"
            yield from _fits(what, engine.total * neighbours + rank.total * shared, gpu)
    yield from _object_store(config, model)


def _longest(config: Config) -> int:
    """Tokens of the longest row that there may be, as far as the configuration bounds it."""
    bounds = (
        [source.max_prompt_tokens for source in config.task.sources.values()]
        if isinstance(config.task, DataTask)
        else [0]
    )
    return max(bounds) + longest_completion(config)


def _cache(engine: memory.EngineMemory, longest: int, gpu: Gpu) -> Findings:
    parts = f"weights {_gib(engine.weights)}, cache {_gib(engine.cache)} ({engine.tokens:,} tokens)"
    yield Finding("engine memory", "ok", f"about {_gib(engine.total)}: {parts}")
    if engine.tokens < longest:
        text = (
            f"the cache does not hold one completion of {longest} tokens: raise mem_fraction_static or max_total_tokens"
        )
        yield Finding("engine memory", "error" if gpu.known else "not here", text)


def _fits(what: str, size: int, gpu: Gpu) -> Findings:
    if size <= gpu.gib * GIB:
        return
    has = "the GPU has" if gpu.known else "taken for granted (see --gpu-gib) are"
    text = f"about {_gib(size)} are too much for one GPU: {has} {gpu.gib:.0f} GiB"
    yield Finding(what, "error" if gpu.known else "not here", text)


def _object_store(config: Config, model: memory.Sizes) -> Findings:
    wanted, has = memory.object_store(model), config.cluster.object_store_mib * 2**20
    if config.cluster.address == LOCAL and wanted > has:
        mib = -(-wanted // 2**20)
        yield Finding(
            "object store", "note", f"weights spill to disk: cluster.object_store_mib = {mib} would hold them"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
