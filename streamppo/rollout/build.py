"""Builds the configured engine. Only this file depends on `engine.kind`."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from streamppo.config.rollout import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ModelError, TaskError
from streamppo.rollout import positions
from streamppo.rollout.embedded import decoder
from streamppo.rollout.embedded import engine as embedded
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Engine, Sampling
from streamppo.rollout.machine_weights import MachinePuller
from streamppo.rollout.player import Player
from streamppo.rollout.puller import Puller
from streamppo.rollout.sglang import engine as sglang
from streamppo.rollout.sglang import in_process, push, server, wire
from streamppo.rollout.sglang.link import Start
from streamppo.rollout.sglang.session import SessionSetup
from streamppo.rollout.weight_checks import Architecture
from streamppo.tasks import stop as stops
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Ints
from streamppo.weights.models.settings import as_pushed, is_tied, read_settings
from streamppo.weights.transport import Receiver

if TYPE_CHECKING:
    from ray.actor import ActorProxy
    from transformers import PreTrainedConfig

    from streamppo.queue.actor import QueueActor

log = logging.getLogger(__name__)


def sampling(config: Config) -> Sampling:
    """Return the sampling parameters of training."""
    rollout = config.rollout
    return Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k)


def stop(config: Config, model_path: str, tokenizer: Tokenizer | None) -> Stop:
    """Return the tokens and strings that end a completion. Raises `ModelError` if an eos_token_id is not a token."""
    return _stop(config, model_path, read_settings(model_path), tokenizer)


def player(config: Config, engine: Engine, model_path: str, tokenizer: Tokenizer) -> Player:
    """Return the configured player, which plays on `engine`."""
    ends, scored = stop(config, model_path, tokenizer), bool(config.reward.scorers)
    return Player(engine, tokenizer, config.environment, ends, scored=scored)


def _stop(config: Config, model_path: str, hf_config: "PreTrainedConfig", tokenizer: Tokenizer | None) -> Stop:
    return stops.read(model_path, hf_config, None if tokenizer is None else tokenizer.hf, config.rollout.stop)


def puller(config: Config, name: str, queue: "ActorProxy[QueueActor]", receiver: Receiver) -> Puller:
    """Build the puller of the actor `name`. If engines read shared memory, a machine's actors share its copies."""
    if not config.rollout.engine.shares_weights(adapted=config.model.lora is not None):
        return Puller(name, queue, receiver)
    import ray

    namespace, block_bytes = ray.get_runtime_context().namespace, config.learner.bucket_bytes
    return MachinePuller(name, queue, receiver, namespace=namespace, block_bytes=block_bytes)


async def engine(
    config: Config,
    actor: str,
    model_path: str,
    version: int,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    *,
    place: int = 0,
) -> Engine:
    """Build engine number `place` with `tensors` as the weights of `version`. Raises `ModelError` or `WeightsError`."""
    if config.rollout.gpus and not torch.cuda.is_available():
        raise ModelError(f"rollout.gpus is {config.rollout.gpus:g}, and torch finds no GPU here")
    file_config = read_settings(model_path)
    hf_config = as_pushed(deepcopy(file_config), tensors)
    model = _model(config, model_path, hf_config, tokenizer or _tokenizer(model_path))
    seed = crc32(f"{config.seed}/{actor}".encode())
    match config.rollout.engine.at(place):
        case EmbeddedEngine(kv=kv):
            engine = embedded.EmbeddedEngine(
                model.hf_config,
                tensors,
                version=version,
                slots=config.rollout.slots,
                max_total_tokens=decoder.row_limit(model.hf_config, model.room),
                ends=EndTokens(model.stop.ids, model.completes, model.unknown),
                seed=seed,
                kv=kv,
                dtype=getattr(torch, config.model.dtype),
                float32_head=config.model.float32_head,
                device="cuda" if config.rollout.gpus else "cpu",
            )
            engine.reserve(model.room, turns=config.environment is not None)
            return engine
        case SGLangEngine() as settings:
            if reason := positions.refusal(model.hf_config, model.room):
                raise ModelError(reason)
            architecture = Architecture(model.hf_config)
            await asyncio.to_thread(architecture.check_names, model_path)
            untied = is_tied(file_config) and not is_tied(hf_config)
            setup = SessionSetup(
                _start(config, settings, model_path, model, seed, untied=untied),
                _connect(config, settings),
                settings.kv,
                model.vocabulary,
                settings.start_s,
                room=model.room,
                routes=settings.routes,
                strings=model.stop.strings,
                unknown=model.unknown,
                encoders=architecture.encoders,
                bucket_bytes=config.learner.bucket_bytes,
                shared=settings.transport == "tensor",
                eos_ids=model.stop.ids,
                context=model.context,
            )
            return await sglang.start(setup, architecture, version, tensors)


class EngineModel(NamedTuple):
    """A model's settings, its longest row `context`, and the longest row `room` of this configuration."""

    hf_config: "PreTrainedConfig"
    stop: Stop
    vocabulary: int
    context: int
    room: int
    unknown: Sequence[int] = ()
    completes: Callable[[Ints], bool] | None = None


def _model(config: Config, model_path: str, hf_config: "PreTrainedConfig", tokenizer: Tokenizer | None) -> EngineModel:
    ends, longest = _stop(config, model_path, hf_config, tokenizer), longest_row(config)
    vocabulary, context = hf_config.get_text_config().vocab_size, positions.longest(hf_config, longest)
    model = EngineModel(hf_config, ends, vocabulary, context, min(context, longest))
    if tokenizer is None:
        return model
    log.info("completions end at %s", ends.describe(tokenizer.name) or "their length limit only")
    if unknown := tokenizer.unknown_ids(vocabulary):
        log.info("%d rows of the vocabulary are not tokens of the tokenizer, and never sampled", len(unknown))
    return model._replace(unknown=unknown, completes=ends.make_check(tokenizer.spell))


def _tokenizer(model_path: str) -> Tokenizer | None:
    try:
        return Tokenizer(model_path)
    except TaskError:
        # Engines take and return token ids, so a model without a tokenizer runs too.
        return None


def _start(
    config: Config, settings: SGLangEngine, model_path: str, model: "EngineModel", seed: int, *, untied: bool
) -> Start:
    """Connect to a server in `urls` (not with an `untied` head), or launch SGLang. Raises `ModelError`."""
    slots, strings = config.rollout.slots, model.stop.strings
    if settings.urls:
        if untied:
            raise ModelError(
                f"{model_path}: its head is a separate weight, but its config.json ties it to the embedding, and an "
                "SGLang server follows config.json: set tie_word_embeddings = false there, and start the server with it"
            )
        (url,) = settings.urls
        key = os.environ.get(settings.api_key_env, "")
        server.check_address(url, key)
        learner = {"dtype": config.model.dtype, "enable_fp32_lm_head": config.model.float32_head}
        return partial(server.connect, settings, key, slots, strings, learner)
    version = wire.installed_version()
    launch_settings = in_process.LaunchSettings(
        wire.arguments(config, settings, model_path, slots * model.room, version, loads_tokenizer=bool(strings))
        | wire.head(settings, untied=untied),
        wire.environment(config, local=Path(model_path).is_dir()),
        capacity=slots,
        ranks=wire.ranks(config),
        seed=seed % 2**31,
        start_s=settings.start_s,
    )
    return partial(in_process.start, launch_settings)


def _connect(config: Config, settings: SGLangEngine) -> push.Connect:
    bucket_bytes = config.learner.bucket_bytes
    if settings.transport == "group":
        has_own_gpu = bool(settings.urls and config.rollout.gpus)
        return partial(push.by_group, bucket_bytes, settings.urls[0] if settings.urls else "", has_own_gpu)
    if settings.urls:
        # By default torch passes file descriptors, which only children of this process can receive.
        torch.multiprocessing.set_sharing_strategy("file_system")
    return partial(push.by_shared_memory, bucket_bytes, bool(settings.urls))
