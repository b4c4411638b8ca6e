"""The engine that the configuration chooses, and how it samples."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

from streamppo.config import Config, EmbeddedEngine, SGLangEngine
from streamppo.errors import ModelError
from streamppo.rollout import embedded
from streamppo.rollout.engine import Engine, Sampling


def limit_threads(threads: int) -> None:
    """CPU threads of this process's torch."""
    torch.set_num_threads(threads)


def sampling(config: Config) -> Sampling:
    """How completions are sampled in training."""
    rollout = config.rollout
    return Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k)


def engine(config: Config, actor: str, model_path: str, version: int, tensors: Mapping[str, Any]) -> Engine:
    """The engine of `actor`, holding `tensors` as `version`. Raises `ModelError` for a model that it cannot run."""
    from transformers import AutoConfig, GenerationConfig

    match config.rollout.engine:
        case EmbeddedEngine(kv=kv):
            hf_config = AutoConfig.from_pretrained(model_path)
            return embedded.EmbeddedEngine(
                hf_config,
                tensors,
                version=version,
                slots=config.rollout.slots,
                max_total_tokens=hf_config.max_position_embeddings,
                eos_ids=_eos_ids(hf_config, model_path, GenerationConfig),
                seed=crc32(f"{config.seed}/{actor}".encode()),
                kv=kv,
                dtype=getattr(torch, config.model.dtype),
                float32_head=config.model.float32_head,
                device="cuda" if config.rollout.gpus else "cpu",
            )
        case SGLangEngine():
            raise ModelError("SGLang is not there yet")


def _eos_ids(hf_config: Any, model_path: str, generation: Any) -> set[int]:
    """Every token that ends a completion: the generation settings know more of them than the model's own."""
    try:
        eos = generation.from_pretrained(model_path).eos_token_id
    except OSError:
        eos = hf_config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
