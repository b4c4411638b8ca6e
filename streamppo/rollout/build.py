"""Builds the engine that the configuration chooses: the one place that asks which it is."""

import asyncio
import os
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import torch
from torch import Tensor

from streamppo.config.engine import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import Config
from streamppo.errors import ModelError
from streamppo.rollout.embedded import engine as embedded
from streamppo.rollout.engine import Engine, Sampling
from streamppo.rollout.fit import Architecture
from streamppo.rollout.sglang import engine as sglang
from streamppo.rollout.sglang import own, push, server, wire
from streamppo.rollout.sglang.life import Setup
from streamppo.rollout.sglang.link import Start
from streamppo.weights.models.settings import as_pushed, as_written, is_tied

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def sampling(config: Config) -> Sampling:
    """Give the sampling parameters of training."""
    rollout = config.rollout
    return Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k)


async def engine(config: Config, actor: str, model_path: str, version: int, tensors: Mapping[str, Tensor]) -> Engine:
    """Build the engine of `actor`, holding `tensors` as `version`; of `urls` there is that of this actor alone.

    Raises `ModelError` for a model that it cannot run, and `WeightsError` for tensors that do not fit the model.
    """
    if config.rollout.gpus and not torch.cuda.is_available():
        raise ModelError(f"rollout.gpus is {config.rollout.gpus:g}, and torch finds no GPU here")
    written = as_written(model_path)
    hf_config = as_pushed(deepcopy(written), tensors)
    eos_ids = _eos_ids(hf_config, model_path)
    seed = crc32(f"{config.seed}/{actor}".encode())
    match config.rollout.engine:
        case EmbeddedEngine(kv=kv):
            return embedded.EmbeddedEngine(
                hf_config,
                tensors,
                version=version,
                slots=config.rollout.slots,
                max_total_tokens=hf_config.max_position_embeddings,
                eos_ids=eos_ids,
                seed=seed,
                kv=kv,
                dtype=getattr(torch, config.model.dtype),
                float32_head=config.model.float32_head,
                device="cuda" if config.rollout.gpus else "cpu",
            )
        case SGLangEngine() as chosen:
            await asyncio.to_thread(Architecture(hf_config).check_names, model_path)
            untied = is_tied(written) and not is_tied(hf_config)
            start = _start(config, chosen, model_path, hf_config.max_position_embeddings, seed, untied=untied)
            connect = _connect(config, chosen, actor)
            setup = Setup(
                start,
                connect,
                chosen.kv,
                hf_config.vocab_size,
                chosen.start_s,
                cuts=sampling(config).cuts,
                segments=config.queue.segments is not None,
                routes=chosen.routes,
            )
            return await sglang.start(
                setup,
                hf_config,
                version=version,
                tensors=tensors,
                eos_ids=eos_ids,
                max_total_tokens=hf_config.max_position_embeddings,
            )


def _start(
    config: Config, chosen: SGLangEngine, model_path: str, context: int, seed: int, *, untied: bool = False
) -> Start:
    """Choose how SGLang starts: as a server that runs already, or in processes of the actor's own.

    A model is `untied` that has a head of its own, against its config.json. Raises `ModelError` for one in a server.
    """
    slots = config.rollout.slots
    if chosen.urls:
        if untied:
            raise ModelError(
                f"{model_path}: its head is a weight of its own, and config.json says that it is the embedding, which "
                "an SGLang server believes: set tie_word_embeddings = false there, and start the server with it"
            )
        (url,) = chosen.urls
        key = os.environ.get(chosen.api_key_env, "")
        server.check_address(url, key)
        return partial(server.connect, chosen, key, slots)
    version = wire.installed()
    settings = own.Settings(
        version,
        wire.arguments(config, chosen, model_path, slots * context, version) | wire.head(chosen, untied=untied),
        wire.environment(config, local=Path(model_path).is_dir()),
        capacity=slots,
        ranks=wire.ranks(config),
        seed=seed % 2**31,
        start_s=chosen.start_s,
    )
    return partial(own.start, settings)


def _connect(config: Config, chosen: SGLangEngine, actor: str) -> push.Connect:
    """Choose the way of weights into SGLang."""
    bucket_bytes = config.learner.bucket_bytes
    match chosen.transport:
        case "tensor":
            return partial(push.by_shared_memory, bucket_bytes, bool(chosen.urls))
        case "group":
            apart = bool(chosen.urls and config.rollout.gpus)
            return partial(push.by_group, bucket_bytes, chosen.urls[0] if chosen.urls else "", apart)
        case "disk":
            return partial(push.by_disk, Path(chosen.folder) / actor)


def _eos_ids(hf_config: "PreTrainedConfig", model_path: str) -> set[int]:
    """Find every token that ends a completion: the generation settings know more of them than the model's own."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        eos = hf_config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
