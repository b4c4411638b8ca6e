"""The policy, its critic and its reference: Hugging Face causal LMs, sharded by FSDP2.

B trajectories, L prompt + completion tokens, T completion tokens, D width, N completion tokens without padding.
"""

from collections.abc import Iterable
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
    """Log-probs and entropies at `temperature`, and values, of given completions.

    The critic is a value head on the policy's hidden states, or on those of `critic`, a transformer of its own.
    """

    def __init__(self, lm: Any, temperature: float, critic: Any = None) -> None:
        super().__init__()
        self.lm = lm
        self.critic = critic
        self.temperature = temperature
        self.value_head = nn.Linear((lm if critic is None else critic).config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, rows: Packed) -> Scored:
        """Score `rows`. The hidden state at place i predicts token i + 1, so token t is scored at start + t - 1."""
        width_T, device = rows.mask_BT.shape[1], rows.start_B.device
        width_L = rows.inputs_BL.shape[1]
        at_BT = (rows.start_B[:, None] - 1 + torch.arange(width_T + 1, device=device)).clamp(max=width_L - 1)
        hidden_BTD = self._hidden(self.lm.base_model, rows, at_BT)
        critic_BTD = hidden_BTD if self.critic is None else self._hidden(self.critic, rows, at_BT)
        values_BT = self.value_head(critic_BTD.float()).squeeze(-1)
        valid_BT = torch.arange(width_T, device=device) < rows.length_B[:, None]
        targets_BT = rows.inputs_BL.gather(1, (at_BT[:, :-1] + 1).clamp(max=width_L - 1))
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
            values_BT[torch.arange(len(values_BT), device=device), rows.length_B],
        )

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that the policy does not use."""
        own = [] if self.critic is None else list(self.critic.parameters())
        return [*own, *self.value_head.parameters()]

    def _hidden(self, transformer: Any, rows: Packed, at_BT: Tensor) -> Tensor:
        hidden_BLD = transformer(input_ids=rows.inputs_BL, use_cache=False).last_hidden_state
        return hidden_BLD.gather(1, at_BT[..., None].expand(-1, -1, hidden_BLD.shape[2]))


def load(config: Model, path: str | Path, temperature: float, mesh: DeviceMesh, critic: str = "head") -> Policy:
    """Load a Hugging Face causal LM with fp32 master weights and shard it over `mesh`.

    `critic` is "head", or the path of the critic's own transformer ("policy" for a copy of the policy's).
    Raises `ModelError` if one of them cannot be loaded.
    """
    lm = _read(config, path, mesh.device_type)
    own = None
    if critic != "head":
        own = _read(config, path if critic == "policy" else critic, mesh.device_type).base_model
    policy = Policy(lm, temperature, own).to(mesh.device_type)
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None, reduce_dtype=torch.float32
    )
    if sum(parameter.numel() for parameter in policy.parameters()) > SHARD_LAYERS_ABOVE:
        for transformer in [lm.base_model, *([] if own is None else [own])]:
            for layer in transformer.layers:
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


def _read(config: Model, path: str | Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, attn_implementation=_attention(config, device)
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"the model {str(path)!r} cannot be loaded: {error}") from error


def _attention(config: Model, device: str) -> str:
    if config.attention != "auto":
        return config.attention
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if device == "cuda" and is_flash_attn_2_available() else "sdpa"
