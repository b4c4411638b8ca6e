"""The policy, its critic and its reference: Hugging Face causal LMs, sharded by FSDP2.

B trajectories, L prompt + completion tokens, T completion tokens, D width, N completion tokens without padding.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from streamppo.algorithms.chunked_head import chunked_logprobs_entropy
from streamppo.config.model import JOINED, Lora
from streamppo.errors import ModelError
from streamppo.learner.attention import attention, layers, prefix_kv, prefix_sharing, shared_keys, tree
from streamppo.learner.attention.attention import Layout, RowLayout
from streamppo.learner.attention.layers import Checkpointing
from streamppo.learner.batch.padded import Host, PaddedBatch
from streamppo.learner.device import to_device
from streamppo.learner.model import adapters, lm_head
from streamppo.learner.model.working_copy import WorkingCopy
from streamppo.learner.parallel import context_parallel, tensor_parallel
from streamppo.learner.parallel.routing import Routers
from streamppo.types import Tensor as Described
from streamppo.weights.adapters import merge_adapters
from streamppo.weights.buckets import Shard, describe_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part: TypeAlias = Literal["policy", "critic", "both"]
"""The results of a pass: "policy" gives log-probs and entropies, "critic" gives values, "both" gives all of them."""
HEAD_CHUNK = 4096
"""The number of tokens whose logits exist at one time, if the head has no kernels."""


class PolicyOutput(NamedTuple):
    """The scores of the completion tokens of some rows; 0 beyond `length_B` and for a part that was not computed.

    If rows have candidates, log-probs and entropies are normalised over them. `bootstrap_B` is the critic's value after
    the last token.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    values_BT: Tensor
    bootstrap_B: Tensor


class Entries(NamedTuple):
    """Entries of a [B, T] result (rows [N], columns [N]), and their indices in a transformer's flattened output."""

    entry_2N: tuple[Tensor, Tensor]
    index_N: Tensor


NO_ENTRIES = Entries((torch.empty(0), torch.empty(0)), torch.empty(0))


class PassLayout(NamedTuple):
    """The layout of a pass: the transformers' input, the scored tokens and their ids, and the tokens with a value."""

    row_layout: RowLayout
    policy: Entries
    target_N: Tensor
    values: Entries


class Policy(nn.Module):
    """Scores completions: log-probs and entropies at `temperature`, and values.

    The critic is a value head on the policy's hidden states, or on those of `critic`, a separate transformer. Policy
    and critic use the same `layout`. `share_prompts`: the samples of a prompt share its forward pass (shared_keys.py),
    in padded rows if that is less work (prefix_sharing.py). `detach_context`: the context of completions is computed
    without gradient (prefix_kv.py). `slices`: rows are split between ranks, and each of these ranks gets the scores of
    all the row's tokens (context_parallel.py). `replays_routes`: tokens go to the experts that the engine chose
    (routing.py). Rows end to end are padded to a multiple of `step` tokens. `unknown_V` excludes tokens from the
    distribution (lm_head.py). `working_copy` has the weights in the compute type, unless FSDP casts them.
    """

    def __init__(self, lm: Any, temperature: float, critic: Any = None, *, layout: Layout = attention.padded) -> None:
        super().__init__()
        self.lm = lm
        self.critic = critic
        self.temperature = temperature
        self.float32_head = True
        self.layout = layout
        self.share_prompts = False
        self.step = 1
        self.detach_context = False
        self.slices = context_parallel.WHOLE
        self.routers = Routers(None)
        self.checkpointing: Checkpointing = "off"
        self.replays_routes = False
        self.head_shape = lm_head.shape_of(lm)
        self.unknown_V: Tensor | None = None
        self.working_copy: WorkingCopy | None = None
        self.value_head = nn.Linear((lm if critic is None else critic).config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, rows: PaddedBatch, part: Part) -> PolicyOutput:
        """Score `rows`. The hidden state at index i predicts token i + 1, so token t is scored at start + t - 1."""
        if self.working_copy is not None:
            self.working_copy.refresh()
        pass_layout = self._lay_out(rows, part)
        if pass_layout.row_layout.context is None:
            routes = rows.routes if self.replays_routes else None
            self.routers.expect(pass_layout.row_layout, rows.on_host.start_B + rows.on_host.length_B, routes)
        scored, hidden_ND = empty_output(rows), None
        if part != "critic":
            hidden_ND = self._hidden(self.lm.base_model, pass_layout.row_layout)
            logprobs_N, entropy_N = chunked_logprobs_entropy(
                # Index rows, do not call `gather`: the deterministic gradient of indexing sorts D times fewer numbers.
                hidden_ND[pass_layout.policy.index_N],
                self.lm.get_output_embeddings().weight,
                pass_layout.target_N,
                temperature=self.temperature,
                chunk=HEAD_CHUNK,
                float32_matmul=self.float32_head,
                candidates=None if rows.candidates is None else rows.candidates.at(pass_layout.policy.entry_2N),
                bias_V=lm_head.bias_of(self.lm, self.unknown_V),
                shape=self.head_shape,
            )
            scored = scored._replace(
                logprobs_BT=self._spread(pass_layout.policy, logprobs_N, scored.logprobs_BT),
                entropy_BT=self._spread(pass_layout.policy, entropy_N, scored.entropy_BT),
            )
        if part != "policy":
            values_BT = self._values(pass_layout, rows, hidden_ND)
            row_B, column_T = (torch.arange(size, device=values_BT.device) for size in rows.mask_BT.shape)
            scored = scored._replace(
                values_BT=values_BT[:, :-1].masked_fill(column_T >= rows.length_B[:, None], 0.0),
                bootstrap_B=values_BT[row_B, rows.length_B],
            )
        return scored

    def _lay_out(self, rows: PaddedBatch, part: Part) -> PassLayout:
        host, device, width_T = rows.on_host, rows.start_B.device, rows.mask_BT.shape[1]
        row_layout, last_B = self._row_layout(host, device), host.start_B + host.length_B - 1
        position_BT = torch.minimum(host.start_B[:, None] - 1 + torch.arange(width_T + 1), last_B[:, None])
        # With slices, only this rank's tokens have an index.
        index_BT = row_layout.index_BL.gather(1, position_BT)
        is_scored_BT = (torch.arange(width_T + 1) <= host.length_B[:, None]) & (index_BT >= 0)
        values = _entries(is_scored_BT, index_BT, device) if part != "policy" else NO_ENTRIES
        if part == "critic":
            return PassLayout(row_layout, NO_ENTRIES, NO_ENTRIES.index_N, values)
        is_scored_BT = is_scored_BT[:, :-1] & (torch.arange(width_T) < host.length_B[:, None])
        targets_BT = host.inputs_BL.gather(1, (position_BT[:, :-1] + 1).clamp(max=host.inputs_BL.shape[1] - 1))
        policy, target_N = _entries(is_scored_BT, index_BT, device), to_device(targets_BT[is_scored_BT], device)
        return PassLayout(row_layout, policy, target_N, values)

    def set_context(self, prefix: Literal["attached", "detached"]) -> None:
        """Set whether contexts get a gradient. Raises `ModelError` if the model cannot do without that gradient."""
        self.detach_context = prefix == "detached"
        if self.detach_context:
            prefix_kv.prepare(self.transformers)

    def set_routes(self, *, replayed: bool) -> None:
        """Use the engine's choice of experts, or the routers'. Raises `ModelError` for `replayed` without experts."""
        if replayed and not self.routers:
            raise ModelError("rollout.engine.routes needs a mixture of experts, which the model is not")
        self.replays_routes = replayed

    @property
    def transformers(self) -> "list[PreTrainedModel]":
        return [self.lm.base_model, *([] if self.critic is None else [self.critic])]

    @property
    def masked_width(self) -> int | None:
        """The model's width if a mask may represent a row's branches; None if each path must be computed separately."""
        configs = [transformer.config for transformer in self.transformers]
        masked = all(config._attn_implementation == "sdpa" for config in configs)
        full = all(attention.has_full_attention(config, context_parallel.KNOWN) for config in configs)
        return self.lm.base_model.config.hidden_size if masked and full else None

    def sizes(self, host: Host) -> tree.RowSizes:
        sizes = tree.sizes(host, self.layout, None if host.branches is None else self.masked_width)
        if host.branches is not None or not (self.shares_keys or self.shares_rows):
            return sizes
        return sizes._replace(prompts=host.shared_prompts())

    @property
    def shares_keys(self) -> bool:
        """True if rows lie end to end and all samples of a prompt use its keys (shared_keys.py)."""
        # With slices, keys would be repeated before they are exchanged.
        is_whole = self.slices.ranks == 1 and not self.detach_context
        return self.share_prompts and self.layout is attention.joined and is_whole

    @property
    def shares_rows(self) -> bool:
        """True if the samples of a prompt may be one padded row (prefix_sharing.py)."""
        return self.share_prompts and self.layout is not attention.joined and not self.detach_context

    def critic_parameters(self) -> Iterable[nn.Parameter]:
        parameters = [] if self.critic is None else list(self.critic.parameters())
        return [*parameters, *self.value_head.parameters()]

    def _row_layout(self, host: Host, device: torch.device) -> RowLayout:
        inputs_BL, start_B, width_B = host.inputs_BL, host.start_B, host.start_B + host.length_B
        if host.branches is not None:
            if self.detach_context or self.slices.ranks > 1:
                raise ModelError(
                    "rows with branches do not support queue.segments, learner.mesh.context and learner.mesh.tensor"
                )
            return tree.lay_out(host, self.layout, self.masked_width, device)
        if self.detach_context:
            if self.layout is attention.joined:
                return prefix_kv.joined(inputs_BL, start_B, width_B, device)
            return prefix_kv.padded(inputs_BL, start_B, width_B, device, share=self.share_prompts)
        if self.shares_keys:
            return shared_keys.lay_out(inputs_BL, start_B, width_B, device, step=self.step)
        if self.layout is attention.joined:
            row_layout = attention.joined(inputs_BL, width_B, device, step=self.step)
        elif self.share_prompts:
            hidden = self.lm.base_model.config.hidden_size
            row_layout = prefix_sharing.lay_out(inputs_BL, start_B, width_B, hidden, device)
        else:
            row_layout = self.layout(inputs_BL, width_B, device)
        return context_parallel.slice_row_layout(row_layout, self.slices)

    def _values(self, pass_layout: PassLayout, rows: PaddedBatch, hidden_ND: Tensor | None) -> Tensor:
        if self.critic is not None or hidden_ND is None:
            hidden_ND = self._hidden(self.lm.base_model if self.critic is None else self.critic, pass_layout.row_layout)
        values_N1 = self.value_head(hidden_ND[pass_layout.values.index_N].float())
        zeros_BT = torch.zeros(len(rows.mask_BT), rows.mask_BT.shape[1] + 1, device=rows.mask_BT.device)
        return self._spread(pass_layout.values, values_N1[:, 0], zeros_BT)

    def _spread(self, entries: Entries, result_N: Tensor, zeros_BT: Tensor) -> Tensor:
        return context_parallel.sum_over_slices(zeros_BT.index_put(entries.entry_2N, result_N), self.slices)

    def _hidden(self, transformer: Any, row_layout: RowLayout) -> Tensor:
        # Only a joined layout without flash-attn needs transformers' search for packed rows.
        is_flash = transformer.config._attn_implementation in JOINED
        with attention.without_packing_search() if is_flash or self.layout is attention.padded else nullcontext():
            context = {} if row_layout.context is None else prefix_kv.keys_and_values(transformer, row_layout.context)
            with layers.offloading(self.checkpointing, row_layout.arguments["input_ids"].device):
                return transformer(**row_layout.arguments, **context, use_cache=False).last_hidden_state.flatten(0, 1)


def _entries(is_scored_BT: Tensor, index_BT: Tensor, device: torch.device) -> Entries:
    row_N, column_N = is_scored_BT.nonzero(as_tuple=True)
    indices = row_N, column_N, index_BT[row_N, column_N]
    row_N, column_N, index_N = (to_device(index, device) for index in indices)
    return Entries((row_N, column_N), index_N)


def empty_output(rows: PaddedBatch) -> PolicyOutput:
    """Scores of zero in the shape of `rows`, in float32."""
    zeros_BT = torch.zeros(rows.mask_BT.shape, device=rows.mask_BT.device)
    zeros_B = torch.zeros(rows.start_B.shape, device=rows.start_B.device)
    return PolicyOutput(zeros_BT, zeros_BT.clone(), zeros_BT.clone(), zeros_B)


def release(policy: Policy) -> None:
    """Free FSDP's records of passes and gathered weights; no backward pass is possible afterwards."""
    if not isinstance(policy, FSDPModule):
        return
    sharded: Any = policy
    sharded.reshard()
    # Only the newest torch has a public API that clears FSDP's record of passes.
    order = sharded._get_fsdp_state()._comm_ctx.post_forward_order
    for group in order:
        group._post_forward_indices.clear()
    order.clear()


def shards(policy: Policy, dtype: str) -> dict[str, Shard]:
    """This rank's shard of every trained tensor of the policy, without the critic, in `dtype`; tied weights once."""
    target = getattr(torch, dtype)
    return {name: _shard(parameter, target) for name, parameter in adapters.adapter_parameters(policy.lm).items()}


@torch.no_grad()
def frozen(policy: Policy, dtype: str) -> tuple[Described, ...]:
    """Describe a version's frozen tensors in `dtype`, with the hash of this rank's shards; they are never pushed."""
    target = getattr(torch, dtype)
    described: list[Described] = []
    for name, parameter in adapters.frozen(policy.lm).items():
        shard = _shard(parameter, target)
        values = local(parameter) if shard.nbytes else torch.empty(shard.local_shape)
        described.append(describe_tensor(name, shard, values.to("cpu", target)))
    return tuple(described)


def _shard(parameter: Tensor, dtype: torch.dtype) -> Shard:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        # An unsharded weight is equal on all ranks; rank 0 publishes it.
        whole = Shard.whole(parameter)
        return Shard(dtype, shape, 0, whole.rows if dist.get_rank() == 0 else 0)
    # FSDP shards the first dimension; a rank without rows has no chunk.
    chunks: list[Any] = parameter.__create_chunk_list__()
    if not chunks or not parameter.to_local().numel() or rank_in_copy(parameter.device_mesh) != dist.get_rank():
        return Shard(dtype, shape, 0, 0)
    (chunk,) = chunks
    begin, rows = chunk.offsets[0], chunk.sizes[0]
    if tensor_parallel.is_cut_by_columns(parameter):
        first, end = tensor_parallel.own_rows(rows, parameter)
        return Shard(dtype, shape, begin + first, end - first)
    assert tuple(chunk.sizes[1:]) == shape[1:], "sharded along another dimension than the first"
    return Shard(dtype, shape, begin, rows)


def rank_in_copy(mesh: DeviceMesh) -> int:
    """The rank in the model's first replica that has the same shards as this rank."""
    return dist.get_rank() % (mesh.size() // tensor_parallel.copies(mesh))


def device_of(policy: nn.Module) -> torch.device:
    """The device on which `policy` computes; its shards may be in CPU memory."""
    parameter = next(policy.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a weight or of its gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def gather_weights(policy: Policy, dtype: str, lora: Lora | None = None) -> dict[str, Tensor]:
    """All weights of a version in `dtype`, with adapters merged, on rank 0; empty on other ranks. A collective."""
    frozen_weights, trained_weights = (
        {name: _full_tensor(parameter.detach().to(getattr(torch, dtype))) for name, parameter in parameters.items()}
        for parameters in (adapters.frozen(policy.lm), adapters.adapter_parameters(policy.lm))
    )
    if dist.get_rank():
        return {}
    return trained_weights if lora is None else merge_adapters(frozen_weights, trained_weights, lora.scale)


def _full_tensor(cast: Tensor) -> Tensor:
    """The whole tensor in host memory on rank 0; an empty one on other ranks, whose GPUs may not have room for all."""
    whole = tensor_parallel.whole_of(cast) if isinstance(cast, DTensor) else cast
    return torch.empty(0) if dist.get_rank() else whole.to("cpu", copy=True)
