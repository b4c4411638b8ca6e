"""The policy, its critic and its reference: Hugging Face causal LMs, sharded by FSDP2.

B trajectories, L prompt + completion tokens, T completion tokens, D width, N completion tokens without padding.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streamppo.algorithms.chunked_head import chunked_logprobs_entropy
from streamppo.config.lora import Lora
from streamppo.config.sections import Model
from streamppo.errors import ModelError
from streamppo.learner import adapters, attention, context, head, layers, pretrained, shared, ulysses, weight_files
from streamppo.learner.attention import Layout, Reading
from streamppo.learner.batch import PaddedBatch
from streamppo.learner.pretrained import CriticStart
from streamppo.learner.ulysses import Slices
from streamppo.process import phase
from streamppo.types import Tensor as Described
from streamppo.weights.adapters import merged
from streamppo.weights.buckets import Shard, described

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part: TypeAlias = Literal["policy", "critic", "both"]
"""The result of a pass: log-probs and entropies, values, or all of them."""
HEAD_CHUNK = 4096
"""Tokens whose logits exist at one time."""
SHARD_LAYERS_ABOVE = 16_000_000
"""Parameters above which every layer is gathered on its own; a smaller model is gathered at once."""


class Scored(NamedTuple):
    """The policy's scores of the tokens of some rows; entries beyond `length_B`, or not asked for, are 0.

    Log-probs and entropies are among the candidates of the rows, if there are any. `bootstrap_B` is the critic's value
    after the last token.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    values_BT: Tensor
    bootstrap_B: Tensor


class Policy(nn.Module):
    """Log-probs and entropies at `temperature`, and values, of given completions.

    The critic is a value head on the policy's hidden states, or on those of `critic`, a transformer of its own. Both
    read rows in the same `layout`; with `share_prompts` samples of a prompt as one, where that is less work.
    `detach_context` leaves the context of completions without gradient (learner/context.py). Rows are cut into `slices`
    (learner/ulysses.py), and every rank of these has the scores of all tokens.
    """

    def __init__(
        self,
        lm: Any,
        temperature: float,
        critic: Any = None,
        *,
        float32_head: bool = True,
        layout: Layout = attention.padded,
        share_prompts: bool = False,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.critic = critic
        self.temperature = temperature
        self.float32_head = float32_head
        self.layout = layout
        self.share_prompts = share_prompts
        self.detach_context = False
        self.slices = ulysses.WHOLE
        self.head_shape = head.shape_of(lm)
        self.value_head = nn.Linear((lm if critic is None else critic).config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, rows: PaddedBatch, part: Part) -> Scored:
        """Score `rows`. The hidden state at place i predicts token i + 1, so token t is scored at start + t - 1."""
        width_T, device = rows.mask_BT.shape[1], rows.start_B.device
        width_L, last_B = rows.inputs_BL.shape[1], rows.start_B + rows.length_B - 1
        at_BT = torch.minimum(rows.start_B[:, None] - 1 + torch.arange(width_T + 1, device=device), last_B[:, None])
        reading = self._reading(rows.inputs_BL, rows.start_B, rows.start_B + rows.length_B)
        valid_BT = torch.arange(width_T, device=device) < rows.length_B[:, None]
        # Of rows that are cut into slices, the tokens that this rank computes.
        place_BT = reading.place_BL.gather(1, at_BT)
        scored, hidden_ND = nothing(rows), None
        if part != "critic":
            hidden_ND = self._hidden(self.lm.base_model, reading)
            own_BT = valid_BT & (place_BT[:, :-1] >= 0)
            targets_BT = rows.inputs_BL.gather(1, (at_BT[:, :-1] + 1).clamp(max=width_L - 1))
            logprobs_N, entropy_N = chunked_logprobs_entropy(
                # Rows by index, not `gather` by entry: a deterministic gradient on a GPU sorts D times fewer indices.
                hidden_ND[place_BT[:, :-1][own_BT]],
                self.lm.get_output_embeddings().weight,
                targets_BT[own_BT],
                temperature=self.temperature,
                chunk=HEAD_CHUNK,
                float32_matmul=self.float32_head,
                candidates=None if rows.candidates is None else rows.candidates.at(own_BT),
                bias_V=head.bias_of(self.lm),
                shape=self.head_shape,
            )
            scored = scored._replace(
                logprobs_BT=ulysses.joined(scored.logprobs_BT.masked_scatter(own_BT, logprobs_N), self.slices),
                entropy_BT=ulysses.joined(scored.entropy_BT.masked_scatter(own_BT, entropy_N), self.slices),
            )
        if part != "policy":
            own_BT = torch.arange(width_T + 1, device=device) <= rows.length_B[:, None]
            values_BT = self._values(reading, place_BT, own_BT & (place_BT >= 0), hidden_ND)
            scored = scored._replace(
                values_BT=values_BT[:, :-1].masked_fill(~valid_BT, 0.0),
                bootstrap_B=values_BT[torch.arange(len(values_BT), device=device), rows.length_B],
            )
        return scored

    def set_context(self, prefix: Literal["attached", "detached"]) -> None:
        """Compute the context of completions with its gradient or without. Raises `ModelError` for some models."""
        self.detach_context = prefix == "detached"
        if self.detach_context:
            context.prepare(_transformers(self))

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that the policy does not use."""
        own = [] if self.critic is None else list(self.critic.parameters())
        return [*own, *self.value_head.parameters()]

    def _reading(self, inputs_BL: Tensor, start_B: Tensor, width_B: Tensor) -> Reading:
        if self.detach_context:
            if self.layout is attention.joined:
                return context.joined(inputs_BL, start_B, width_B)
            return context.padded(inputs_BL, start_B, width_B, share=self.share_prompts)
        if self.share_prompts:
            reading = shared.read(inputs_BL, start_B, width_B, self.lm.config.hidden_size)
        else:
            reading = self.layout(inputs_BL, width_B)
        return ulysses.sliced(reading, self.slices)

    def _values(self, reading: Reading, place_BT: Tensor, own_BT: Tensor, hidden_ND: Tensor | None) -> Tensor:
        if self.critic is not None or hidden_ND is None:
            hidden_ND = self._hidden(self.lm.base_model if self.critic is None else self.critic, reading)
        values_N1 = self.value_head(hidden_ND[place_BT[own_BT]].float())
        zeros_BT = torch.zeros(own_BT.shape, device=own_BT.device)
        return ulysses.joined(zeros_BT.masked_scatter(own_BT, values_N1[:, 0]), self.slices)

    def _hidden(self, transformer: Any, reading: Reading) -> Tensor:
        before = {} if reading.context is None else context.keys_and_values(transformer, reading.context)
        return transformer(**reading.arguments, **before, use_cache=False).last_hidden_state.flatten(0, 1)


def nothing(rows: PaddedBatch) -> Scored:
    """Zeros in the shape of `rows`, in float32."""
    zeros_BT = torch.zeros(rows.mask_BT.shape, device=rows.mask_BT.device)
    zeros_B = torch.zeros(rows.start_B.shape, device=rows.start_B.device)
    return Scored(zeros_BT, zeros_BT.clone(), zeros_BT.clone(), zeros_B)


def load(
    config: Model,
    path: str | Path,
    temperature: float,
    mesh: DeviceMesh,
    critic: str = "head",
    *,
    offload: bool = False,
    master: bool = True,
    lora: Lora | None = None,
    slices: Slices = ulysses.WHOLE,
) -> Policy:
    """Load a Hugging Face causal LM with fp32 master weights and shard it over `mesh`. A collective.

    Without `master` its weights are in the type that they compute in, which changes nothing but their memory while
    they stand still.

    Of a large model whose files all ranks see each reads its own rows (weight_files.py). Otherwise rank 0 alone reads
    weights, and sends them tensor by tensor: of the others, none ever holds more than its shards and one tensor, and
    config.json is all that they need at `path`. No random number generator moves on.
    `critic` is that of the configuration; a path to a sequence classification model of one label (a reward model)
    gives the value head its weights as well. `offload` keeps the shards in CPU memory.
    With `lora` the policy's weights are frozen, in the type that they compute in, and its adapters are trained.
    Rows are cut into `slices`.
    Raises `ModelError` if one of them cannot be loaded, or computes log-probs that `Policy` would not, or lets rows see
    each other in the layout that the configuration asks for.
    """
    device = mesh.device_type
    with torch.random.fork_rng(devices=[]):
        plan = weight_files.plan(str(path), critic, adapted=lora is not None)
        whole = _whole(path, critic, lora, plan) if dist.get_rank() == 0 else None
    chosen = attention.choose(config, device)
    made = [] if whole is None else _transformers(whole)
    chosen = attention.without_leaks(chosen, config, path, made)
    share_prompts = config.share_prompts and chosen == "sdpa" and shared.can_share(made)
    policy = sharded(config, path, mesh, critic, chosen, offload=offload, master=master, lora=lora, slices=slices)
    policy.temperature, policy.share_prompts = temperature, share_prompts
    policy.to_empty(device="cpu" if offload else device)
    if plan is None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(policy, {} if whole is None else dict(whole.state_dict()), options=options)
    else:
        _read_rows(policy, plan)
    _send_buffers(policy, whole, device)
    return policy


def sharded(
    config: Model,
    path: str | Path,
    mesh: DeviceMesh,
    critic: str,
    attends: str,
    *,
    offload: bool = False,
    master: bool = True,
    lora: Lora | None = None,
    slices: Slices = ulysses.WHOLE,
) -> Policy:
    """Make the policy of config.json at `path` on the meta device, sharded over `mesh`: its layout without memory.

    `attends` is transformers' name of the attention. Raises `ModelError` for a model whose rows cannot be cut into
    `slices`.
    """
    with torch.device("meta"):
        lm, own = _read(path, critic, ulysses.name_of(attends, slices), weights=False)
        if lora is not None:
            adapters.add(lm, lora, config.dtype)
        if not master:
            for parameter in lm.parameters():
                parameter.data = parameter.data.to(getattr(torch, config.dtype))
        policy = Policy(lm, 1.0, own.transformer, layout=attention.layout(attends))
        policy.float32_head, policy.slices = config.float32_head, slices
    transformers = _transformers(policy)
    for transformer in transformers:
        if refused := ulysses.refusal(transformer.config, slices.ranks):
            raise ModelError(refused)
        layers.checkpoint_activations(transformer, config.gradient_checkpointing)
        if config.compile:
            layers.compile_layers(transformer)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None, reduce_dtype=torch.float32
    )
    # FSDP moves layer by layer what it shards: no GPU ever holds the whole model in float32.
    where = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    if sum(parameter.numel() for parameter in policy.parameters()) > SHARD_LAYERS_ABOVE:
        for transformer in transformers:
            for layer in layers.layers_of(transformer):
                fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=where)
    # Values are regressed on returns: a weight of 8 bits would move them by up to 1 / 256 of their size.
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(policy.value_head, mesh=mesh, mp_policy=exact, offload_policy=where)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=where)
    return policy


def _transformers(policy: Policy) -> "list[PreTrainedModel]":
    return [policy.lm.base_model, *([] if policy.critic is None else [policy.critic])]


def _read(path: str | Path, critic: str, chosen: str, *, weights: bool) -> tuple[Any, CriticStart]:
    return pretrained.read(path, chosen, weights=weights), pretrained.critic(critic, path, chosen, weights=weights)


def _whole(path: str | Path, critic: str, lora: Lora | None, plan: weight_files.Plan | None) -> Policy:
    """All weights, on the CPU; by a `plan`, those of the first layers."""
    if plan is not None:
        head.check(plan.first, path)
        return Policy(plan.first, 1.0, None if critic == "head" else deepcopy(plan.first.base_model))
    lm, own = _read(path, critic, "eager", weights=True)
    head.check(lm, path)
    if lora is not None:
        adapters.add(lm, lora, "float32")
    policy = Policy(lm, 1.0, own.transformer)
    if own.head_1D is not None:
        with torch.no_grad():
            policy.value_head.weight.copy_(own.head_1D)
    return policy


@torch.no_grad()
def _read_rows(policy: Policy, plan: weight_files.Plan) -> None:
    """Fill this rank's shards; a value head, which no file has, begins at 0."""
    for name, parameter in policy.named_parameters():
        own = local(parameter)
        if own.numel():
            begin = parameter.__create_chunk_list__()[0].offsets[0]  # pyright: ignore
            rows = plan.read(name, begin, begin + len(own))
            own.zero_() if rows is None else own.copy_(rows)


def _send_buffers(policy: Policy, whole: Policy | None, device: str) -> None:
    """Give every rank the buffers of `whole`, which only rank 0 has, on `device`.

    A model computes them as it is made and saves them nowhere, such as frequencies of rotary embeddings.
    """
    made = {} if whole is None else dict(whole.named_modules())
    for at, module in policy.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            source = made[at].get_buffer(name) if made else torch.empty_like(buffer)
            sent = source.to(device)
            dist.broadcast(sent, src=0)
            setattr(module, name, sent)


def release(policy: Policy) -> None:
    """Free all that FSDP keeps of forward passes for a backward: a record of each, and gathered weights.

    After this there is nothing to run a backward through.
    """
    sharded: Any = policy
    sharded.reshard()
    # Only the newest torch has a public name for this.
    order = sharded._get_fsdp_state()._comm_ctx.post_forward_order
    for group in order:
        group._post_forward_indices.clear()
    order.clear()


def shards(policy: Policy, dtype: str) -> dict[str, Shard]:
    """The share that this rank has of every tensor that is trained: the policy without its critic, in `dtype`.

    Tied weights appear once, under the name that `named_parameters` gives them.
    """
    target = getattr(torch, dtype)
    return {name: _shard(parameter, target) for name, parameter in adapters.trained(policy.lm).items()}


@torch.no_grad()
def frozen(policy: Policy, dtype: str) -> tuple[Described, ...]:
    """The tensors of a version that stand still, in `dtype`: with the hash of this rank's share, and never pushed."""
    target = getattr(torch, dtype)
    made: list[Described] = []
    for name, parameter in adapters.frozen(policy.lm).items():
        shard = _shard(parameter, target)
        own = local(parameter) if shard.nbytes else torch.empty(shard.local_shape)
        made.append(described(name, shard, own.to("cpu", target)))
    return tuple(made)


def _shard(parameter: Tensor, dtype: torch.dtype) -> Shard:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        # One that is not sharded is the same on all ranks, and published by the first.
        whole = Shard.whole(parameter)
        return Shard(dtype, shape, 0, whole.rows if dist.get_rank() == 0 else 0)
    # FSDP cuts the first dimension. Where it leaves a rank nothing, that rank has no chunk.
    chunks: list[Any] = parameter.__create_chunk_list__()
    if not chunks or not parameter.to_local().numel() or rank_in_copy(parameter.device_mesh) != dist.get_rank():
        return Shard(dtype, shape, 0, 0)
    (chunk,) = chunks
    assert tuple(chunk.sizes[1:]) == shape[1:], "sharded along another dimension than the first"
    return Shard(dtype, shape, chunk.offsets[0], chunk.sizes[0])


def rank_in_copy(mesh: DeviceMesh) -> int:
    """The rank of the first copy of the model that has the same shards as this one."""
    return dist.get_rank() % mesh.size(-1)


@phase("snapshot")
@torch.no_grad()
def snapshot(policy: Policy, into: Mapping[str, Tensor]) -> None:
    """Write this rank's shards to `into`, which has them as `shards` says. No collective."""
    for name, parameter in adapters.trained(policy.lm).items():
        if into[name].numel():
            into[name].copy_(local(parameter))


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a weight, or of its gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def gathered(policy: Policy, dtype: str, lora: Lora | None = None) -> dict[str, Tensor]:
    """All weights of a version in `dtype`, adapters merged, on rank 0 alone; nothing on others. A collective."""
    still, moving = (
        {name: _whole_of(one.detach().to(getattr(torch, dtype))) for name, one in some.items()}
        for some in (adapters.frozen(policy.lm), adapters.trained(policy.lm))
    )
    if dist.get_rank():
        return {}
    return moving if lora is None else merged(still, moving, lora.scale)


def _whole_of(cast: Tensor) -> Tensor:
    """All of a tensor, on rank 0 in memory of its own."""
    whole = cast.full_tensor() if isinstance(cast, DTensor) else cast
    return whole if dist.get_rank() else whole.to("cpu", copy=True)
