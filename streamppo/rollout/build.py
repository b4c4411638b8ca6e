"""The engine that the configuration chooses, and how it samples."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from streamppo.config.engine import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import Config
from streamppo.errors import ModelError
from streamppo.rollout.embedded import engine as embedded
from streamppo.rollout.engine import Engine, Sampling
from streamppo.rollout.sglang import engine as sglang_engine
from streamppo.rollout.sglang import push, wire
from streamppo.rollout.sglang.link import Link
from streamppo.rollout.sglang.own import OwnEngine
from streamppo.rollout.sglang.server import Server


def limit_threads(threads: int) -> None:
    """CPU threads of this process's torch."""
    torch.set_num_threads(threads)


def sampling(config: Config) -> Sampling:
    """How completions are sampled in training."""
    rollout = config.rollout
    return Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k)


async def engine(
    config: Config, actor: str, model_path: str, version: int, tensors: Mapping[str, Any], *, say: Callable[[str], None]
) -> Engine:
    """The engine of `actor`, holding `tensors` as `version`; `say` tells people what befalls it.

    Raises `ModelError` for a model that it cannot run.
    """
    from transformers import AutoConfig, GenerationConfig

    if config.rollout.gpus and not torch.cuda.is_available():
        raise ModelError(f"rollout.gpus is {config.rollout.gpus:g}, and torch finds no GPU here")
    hf_config = AutoConfig.from_pretrained(model_path)
    eos_ids = _eos_ids(hf_config, model_path, GenerationConfig)
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
            made = sglang_engine.SGLangEngine(
                _link(config, chosen, model_path, hf_config.max_position_embeddings, seed),
                _carrier(config, chosen, actor),
                hf_config,
                eos_ids=eos_ids,
                max_total_tokens=hf_config.max_position_embeddings,
                kv=chosen.kv,
                say=say,
            )
            await made.open(version, tensors)
            return made


def _link(config: Config, chosen: SGLangEngine, model_path: str, context: int, seed: int) -> Link:
    """To a server, or to an engine of the actor's own."""
    slots = config.rollout.slots
    if chosen.url:
        key = os.environ.get(chosen.api_key_env, "")
        return Server(chosen.url, key, slots=slots, kv=chosen.kv, start_s=chosen.start_s)
    installed = wire.installed()
    arguments = wire.arguments(config, chosen, model_path, slots * context, installed)
    surroundings = wire.environment(config, local=Path(model_path).is_dir())
    return OwnEngine(installed, arguments, surroundings, seed=seed % 2**31, start_s=chosen.start_s)


def _carrier(config: Config, chosen: SGLangEngine, actor: str) -> push.Carrier:
    """How weights get to it."""
    bucket_bytes = config.learner.bucket_bytes
    match chosen.transport:
        case "tensor":
            return push.BySharedMemory(bucket_bytes, server=bool(chosen.url))
        case "group":
            apart = bool(chosen.url and config.rollout.gpus)
            return push.ByGroup(bucket_bytes, url=chosen.url, gpu=apart)
        case "disk":
            return push.ByDisk(Path(chosen.folder) / actor)


def _eos_ids(hf_config: Any, model_path: str, generation: Any) -> set[int]:
    """Every token that ends a completion: the generation settings know more of them than the model's own."""
    try:
        eos = generation.from_pretrained(model_path).eos_token_id
    except OSError:
        eos = hf_config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
