"""Compares the memory that ranks, engines and Ray's object store need with the available memory."""

from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from streamppo.commands.checks import machine
from streamppo.commands.checks import memory_estimate as estimate
from streamppo.commands.checks.finding import Finding, Findings, State, first_line
from streamppo.config.sections import LOCAL, Config, longest_completion, longest_row, shares_gpus
from streamppo.config.task import DataTask
from streamppo.driver.ray import placement
from streamppo.errors import ModelError
from streamppo.learner import gradient_checkpointing
from streamppo.learner import memory as ranks
from streamppo.rollout import positions
from streamppo.telemetry import host

GIB = 2**30
ASSUMED_GIB = 80.0


class Gpu(NamedTuple):
    """The memory of a GPU, known or assumed."""

    gib: float
    is_known: bool


def gpu(gib: float | None) -> Gpu:
    """Return a GPU with memory `gib`. The default is this machine's GPU or, without a GPU, `ASSUMED_GIB`."""
    if gib is not None:
        return Gpu(gib, True)
    if torch.cuda.is_available():
        return Gpu(torch.cuda.get_device_properties(0).total_memory / GIB, True)
    return Gpu(ASSUMED_GIB, False)


def memory(config: Config, hf_config: PretrainedConfig, gpu: Gpu) -> Findings:
    """Compare the estimated memory of ranks, engines, queue and object store with the available memory."""
    try:
        model = ranks.sizes(hf_config, config.model)
    except ModelError as error:
        yield Finding("memory", "not here", first_line(error))
        return
    yield Finding("parameters", "ok", f"{model.parameters:,} in {model.layers} layers, {config.model.dtype}")
    configured = longest_row(config)
    context = positions.longest(hf_config, configured)
    # Only data tasks bound the tokens of a prompt.
    if configured > context and isinstance(config.task, DataTask):
        text = f"prompt and completion may have {configured} tokens; the model takes {context}: completions end there"
        yield Finding("context", "note", text)
    longest = min(configured, context)
    if config.model.gradient_checkpointing == "auto":
        # A rank resolves "auto" in the same way before it loads the model.
        without = _gib(ranks.rank(config, model, longest).total)
        config = gradient_checkpointing.resolve(config, model, longest, int(gpu.gib * GIB))
        kind = config.model.gradient_checkpointing
        if config.learner.gpus or kind != "off":
            place = f"a GPU of {gpu.gib:.0f} GiB" if config.learner.gpus else "this machine"
            text = f'"{kind}" on {place}: a rank that keeps all activations has about {without}'
            yield Finding("checkpointing", "ok", f"model.gradient_checkpointing = {text}")
    yield from _rank_and_engine(config, model, longest, gpu)
    yield from _host(config, model, longest)
    yield from _shared(config, model)
    yield from _machine(config, model, longest)
    yield from _candidates(config, model)
    yield from _queue(config, model)
    needed, size = estimate.object_store(model), config.cluster.object_store_mib * 2**20
    if config.cluster.address == LOCAL and needed > size:
        text = f"weights spill to disk: cluster.object_store_mib = {-(-needed // 2**20)} would hold them"
        yield Finding("object store", "note", text)


def _host(config: Config, model: ranks.ModelSizes, longest: int) -> Findings:
    actor, actors = estimate.actor(config, model), config.engines
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in actor._asdict().items() if size)
    if common := estimate.shared_version_bytes(config, model):
        text = f"the rollout actors of a node hold {_gib(common)} of weights in common, besides their engines'"
    else:
        text = f"a rollout actor holds {_gib(actor.total)} of weights besides its engine's"
        text += f" ({parts})" if parts else ""
        text += f", all {actors} {_gib(actors * actor.total)}" if parts and actors > 1 else ""
    if config.learner.offload:
        text += f"; every rank {_gib(ranks.state(config, model))} of weights, gradients and moments"
    if config.learner.gpus and (routed := ranks.routes(config, model, longest)):
        text += f"; every rank {_gib(routed)} of its rows' experts"
    yield Finding("host memory", "ok", text)


def _shared(config: Config, model: ranks.ModelSizes) -> Findings:
    shared, common = estimate.actor(config, model).shared, estimate.shared_version_bytes(config, model)
    size_mib = machine.shared_mib()
    if not shared + common or size_mib is None:
        return
    text = f"an engine's actor takes {_gib(shared)}: the served version and the next"
    if common:
        text = f"the actors of a node take {_gib(common)}: the served version, the next, and the one being pulled"
    if config.cluster.address != LOCAL:
        yield Finding("/dev/shm", "ok", text)
        return
    needed = estimate.shared(config, model)
    text += f"; engines and Ray's object store {_gib(needed)} of {_gib(size_mib * 2**20)} here"
    if needed <= size_mib * 2**20:
        yield Finding("/dev/shm", "ok", text)
    else:
        advice = "make it larger (mount -o remount,size=, docker run --shm-size)"
        state = _lack_state(config)
        yield Finding("/dev/shm", state, f"{text}: {advice}, or choose rollout.engine.transport = 'group'")


def _lack_state(config: Config) -> State:
    return "error" if placement.plan(config).total("GPU") <= machine.gpus_here() else "not here"


def _candidates(config: Config, model: ranks.ModelSizes) -> Findings:
    if not config.rollout.excludes_tokens:
        return
    most = estimate.candidate_bytes(config, model)
    batch = most * config.queue.batch_size * longest_completion(config)
    bound = "" if config.rollout.top_k else "; top_k would bound it"
    text = f"at most {most:,} bytes a token besides 13 others, {_gib(batch)} a batch{bound}"
    yield Finding("candidates", "ok", text)


def _queue(config: Config, model: ranks.ModelSizes) -> Findings:
    if not config.learner.gpus:
        return
    load, shards = estimate.queue(config, model), config.queue.shards
    rates = [f"{load.token_bytes * tokens / 1e6:,.0f} MB/s" for tokens in (load.capacity, load.demand)]
    queues = "one queue bears" if shards == 1 else f"{shards} shards bear"
    text = f"{load.token_bytes:,} bytes a token of a completion; {queues} {rates[0]}, {load.capacity:,.0f} tokens a "
    text += f"second; ranks take {rates[1]} at most, {load.demand:,.0f} tokens (half of an H100's peak)"
    if load.demand <= load.capacity:
        yield Finding("queue", "ok", text)
    else:
        yield Finding("queue", "note", f"{text}: queue.shards = {load.shards} would suffice")


def _machine(config: Config, model: ranks.ModelSizes, longest: int) -> Findings:
    engine = estimate.engine(config, model, longest, 0.0)
    rank = ranks.rank(config, model, longest)
    if config.cluster.address != LOCAL:
        return
    needed, size = estimate.machine(config, model, rank, engine, longest), host.total_mib() * 2**20
    parts = ", ".join(f"{name.replace('_', ' ')} {_gib(size)}" for name, size in needed._asdict().items() if size)
    if needed.total <= size:
        yield Finding("this machine", "ok", f"about {_gib(needed.total)} of {_gib(size)}: {parts}")
        return
    text = f"about {_gib(needed.total)} are too much for this machine, which has {_gib(size)}: {parts}"
    advice = "; lower rollout.slots, rollout.max_tokens or max_prompt_tokens for a smaller cache"
    has_large_cache = engine is not None and 4 * config.engines * engine.cache > needed.total
    yield Finding("this machine", _lack_state(config), text + advice * has_large_cache)


def _rank_and_engine(config: Config, model: ranks.ModelSizes, longest: int, gpu: Gpu) -> Findings:
    rank, shared = ranks.rank(config, model, longest), shares_gpus(config)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in rank.parts.items() if size)
    yield Finding("rank", "ok", f"about {_gib(rank.total)}: {parts}")
    if config.learner.gpus and not shared:
        yield from _fits("rank", rank.total, gpu)
    # An engine on a shared GPU starts after the learner has allocated its state.
    free = gpu.gib * GIB - (rank.state + rank.reference if shared else 0)
    engine = estimate.engine(config, model, longest, free)
    if engine is None:
        return
    yield from _cache(engine, longest, gpu, has_turns=config.environment is not None)
    if config.rollout.gpus and shared:
        engines_per_rank = -(-config.engines // config.learner.ranks)
        yield from _fits("rank and engine", rank.total + engines_per_rank * engine.total, gpu)
    elif config.rollout.gpus:
        yield from _fits("engine", engine.total, gpu)


def _cache(engine: estimate.EngineMemory, longest: int, gpu: Gpu, *, has_turns: bool) -> Findings:
    between = ", between turns too" if has_turns else ""
    parts = f"weights {_gib(engine.weights)}, cache {_gib(engine.cache)} ({engine.tokens:,} tokens{between})"
    parts += f", temporary copies of rows {_gib(engine.copied)}" if engine.copied else ""
    yield Finding("engine memory", "ok", f"about {_gib(engine.total)}: {parts}")
    if engine.tokens < longest:
        text = f"the cache does not hold one completion of {longest} tokens"
        advice = "raise mem_fraction_static or max_total_tokens"
        yield Finding("engine memory", "error" if gpu.is_known else "not here", f"{text}: {advice}")


def _fits(subject: str, size: int, gpu: Gpu) -> Findings:
    if size <= gpu.gib * GIB:
        return
    verb = "the GPU has" if gpu.is_known else "an assumed GPU (see --gpu-gib) has"
    text = f"about {_gib(size)} are too much for one GPU: {verb} {gpu.gib:.0f} GiB"
    yield Finding(subject, "error" if gpu.is_known else "not here", text)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
