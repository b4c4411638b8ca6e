"""The policy and its critic: a Hugging Face causal LM with a value head, sharded by FSDP2.

B trajectories, L prompt + completion tokens, T completion tokens, D width, N completion tokens without padding.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streamppo.algorithms.tokens import chunked_logprobs_entropy
from streamppo.config import Model
from streamppo.errors import ModelError
from streamppo.learner.packing import Packed

HEAD_CHUNK = 4096
"""Tokens whose logits exist at one time."""
SHARD_LAYERS_ABOVE = 16_000_000
"""Parameters above which every layer is gathered on its own; a smaller model is gathered at once."""


class Scored(NamedTuple):
    """What the policy says about the tokens of some rows; entries beyond `length_B` are 0.

    `bootstrap_B` is the critic's value after the last token.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    values_BT: Tensor
    bootstrap_B: Tensor


class Policy(nn.Module):
    """Log-probs and entropies at `temperature`, and values, of given completions."""

    def __init__(self, lm: Any, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.value_head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, rows: Packed) -> Scored:
        """Score `rows`. The hidden state at place i predicts token i + 1, so token t is scored at start + t - 1."""
        hidden_BLD = self.lm.base_model(input_ids=rows.inputs_BL, use_cache=False).last_hidden_state
        width_T = rows.mask_BT.shape[1]
        at_BT = (rows.start_B[:, None] - 1 + torch.arange(width_T + 1, device=rows.start_B.device)).clamp(
            max=hidden_BLD.shape[1] - 1
        )
        at_BTD = at_BT[..., None].expand(-1, -1, hidden_BLD.shape[2])
        hidden_BTD = hidden_BLD.gather(1, at_BTD)
        values_BT = self.value_head(hidden_BTD.float()).squeeze(-1)
        valid_BT = torch.arange(width_T, device=at_BT.device) < rows.length_B[:, None]
        targets_BT = rows.inputs_BL.gather(1, (at_BT[:, :-1] + 1).clamp(max=rows.inputs_BL.shape[1] - 1))
        logprobs_N, entropy_N = chunked_logprobs_entropy(
            hidden_BTD[:, :-1][valid_BT],
            self.lm.get_output_embeddings().weight,
            targets_BT[valid_BT],
            temperature=self.temperature,
            chunk=HEAD_CHUNK,
        )
        zeros_BT = logprobs_N.new_zeros(valid_BT.shape)
        return Scored(
            zeros_BT.masked_scatter(valid_BT, logprobs_N),
            zeros_BT.masked_scatter(valid_BT, entropy_N),
            values_BT[:, :-1].masked_fill(~valid_BT, 0.0),
            values_BT[torch.arange(len(values_BT), device=at_BT.device), rows.length_B],
        )


def load(config: Model, path: str | Path, temperature: float, mesh: DeviceMesh) -> Policy:
    """Load a Hugging Face causal LM with fp32 master weights and shard it over `mesh`."""
    from transformers import AutoModelForCausalLM

    try:
        lm: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation=_attention(config, mesh.device_type)
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path {str(path)!r} cannot be loaded: {error}") from error
    policy = Policy(lm, temperature).to(mesh.device_type)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None, reduce_dtype=torch.float32
    )
    if sum(parameter.numel() for parameter in policy.parameters()) > SHARD_LAYERS_ABOVE:
        for layer in lm.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def snapshot(policy: Policy, dtype: str) -> dict[str, Tensor]:
    """The whole policy, without its critic, on the CPU under its HF names. A collective: every rank must call it.

    Tied weights appear once, under the name that `named_parameters` gives them.
    """
    target = getattr(torch, dtype)
    whole: dict[str, Tensor] = {}
    for name, parameter in policy.lm.named_parameters():
        full = parameter.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        # `to` returns the live parameter itself when nothing has to change, and training goes on under the push.
        whole[name] = full.to(device="cpu", dtype=target, copy=True)
    return whole


def _attention(config: Model, device: str) -> str:
    if config.attention != "auto":
        return config.attention
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if device == "cuda" and is_flash_attn_2_available() else "sdpa"
