"""Context parallelism: each rank computes a slice of every row's tokens, for rows that are too long for one rank.

Ulysses, https://arxiv.org/abs/2309.14509. Everything in a layer except attention works token by token, so a rank
computes it only for its slice. For attention the ranks exchange slices of tokens for shares of the heads:

    rank 0   tokens 0 1 2 3   -->   heads 0 1 of tokens 0 .. 7   -->   tokens 0 1 2 3
    rank 1   tokens 4 5 6 7   -->   heads 2 3 of tokens 0 .. 7   -->   tokens 4 5 6 7

B rows, W tokens of a row in its layout (padded), C ranks, S = W / C tokens of a slice, T completion tokens (padded).
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from streamppo.config.learner import Mesh
from streamppo.config.model import JOINED
from streamppo.config.rollout import FAMILIES
from streamppo.learner.attention import attention
from streamppo.learner.attention.attention import RowLayout
from streamppo.learner.device import all_ranks
from streamppo.learner.parallel import tensor_parallel
from streamppo.learner.parallel.tensor_parallel import TensorParallelSpec

KNOWN = (*FAMILIES, "qwen3_moe")
"""Values of model_type whose layers mix tokens only in attention, and whose attention sees all earlier tokens."""
NAME = "slices"
"""The name of the argument that brings `Slices` to a transformer and so to its attention."""
PREFIX = "sliced_"
"""The prefix of the name under which transformers knows a wrapped attention that is not flash-attn."""
_wrapped: dict[str, object] = {}


class Slices(NamedTuple):
    """The groups of context parallelism: rows are split over `ranks` ranks, and this rank has slice `number`.

    `within`: the ranks that have slices of the same rows; `across`: the ranks that have the same slice of other rows;
    both are None if rows are not split. `heads`: the ranks that exchange slices for heads: `within` or, with tensor
    parallelism, the ranks with the same share of the heads; None for a single rank. `cut`: the meshes that split
    weights.
    """

    ranks: int = 1
    number: int = 0
    within: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    heads: dist.ProcessGroup | None = None
    cut: TensorParallelSpec = TensorParallelSpec()

    def data_ranks(self) -> dist.ProcessGroup:
        """The ranks that pass different rows: all ranks if rows are not split."""
        return self.across or all_ranks()

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        groups = tuple(group for group in (self.within, self.across, self.heads) if group is not None)
        return (*groups, *self.cut.groups())


WHOLE = Slices()


def slices_of(device: str, config: Mesh) -> Slices:
    """Make the groups that split rows between neighbouring ranks, and the meshes that split weights. A collective."""
    ranks, cut = config.slices, tensor_parallel.cut_of(device, config)
    if ranks == 1:
        return Slices(cut=cut)
    rows = dist.get_world_size() // ranks
    mesh = init_device_mesh(device, (rows, ranks), mesh_dim_names=("across", "within"))
    number, within, across = mesh.get_local_rank("within"), mesh.get_group("within"), mesh.get_group("across")
    if config.tensor == 1:
        return Slices(ranks, number, within, across, within, cut)
    heads: dist.ProcessGroup | None = None
    if config.context > 1:
        shape, names = (rows, config.context, config.tensor), ("across", "heads", "tensor")
        heads = init_device_mesh(device, shape, mesh_dim_names=names).get_group("heads")
    return Slices(ranks, number, within, across, heads, cut)


def refusal(config: Any, ranks: int) -> str:
    """The reason why `ranks` ranks cannot split the rows of a model of transformers' `config`; "" if they can."""
    if ranks == 1:
        return ""
    choice, model = f"learner.mesh.context * tensor = {ranks}", repr(config.name_or_path)
    if not attention.has_full_attention(config, KNOWN):
        known = ", ".join(KNOWN)
        return f"{choice} needs one of {known}, without a sliding window, and {model} is {config.model_type}"
    if config.num_key_value_heads % ranks:
        return f"{choice} must divide the {config.num_key_value_heads} heads of keys and values of {model}"
    return ""


def name_of(implementation: str, slices: Slices) -> str:
    """Register `implementation`, wrapped for context parallelism, and return its name in transformers.

    A flash-attn keeps its name, by which transformers imports it. SDPA and eager attention get a new name: for a name
    that it does not know, transformers makes no mask, which would cover only a slice.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if slices.ranks == 1:
        return implementation
    name = implementation if implementation in JOINED else PREFIX + implementation
    if name not in _wrapped:
        _wrapped[name] = ALL_ATTENTION_FUNCTIONS[implementation]
        AttentionInterface.register(name, _attend)
    return name


def _attend(
    module: Any,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: Tensor | None,
    *,
    slices: Slices = WHOLE,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute attention for a share of the heads over all tokens; the mask covers all tokens. Returns [B, S, H, D]."""
    compute: Any = _wrapped[module.config._attn_implementation]
    if slices.ranks > 1:
        # The position ids are of one slice, and attention computes whole rows.
        others.pop("position_ids", None)
    if slices.heads is None:
        return compute(module, query_BHSD, key_BHSD, value_BHSD, attention_mask, **others)
    heads = [_ExchangeSlices.apply(tensor, slices.heads, 1, 2) for tensor in (query_BHSD, key_BHSD, value_BHSD)]
    seen_BWHD, _ = compute(module, *heads, attention_mask, **others)
    return _ExchangeSlices.apply(seen_BWHD, slices.heads, 1, 2), None  # pyright: ignore[reportReturnType]


def slice_row_layout(row_layout: RowLayout, slices: Slices) -> RowLayout:
    """Take this rank's slice of `row_layout`. Tokens of other ranks get the index -1."""
    if slices.ranks == 1:
        return row_layout
    tokens_BW = row_layout.arguments["input_ids"]
    assert isinstance(tokens_BW, Tensor) and row_layout.context is None, "rows of tokens"
    width, missing = tokens_BW.shape[1], -tokens_BW.shape[1] % slices.ranks
    size = (width + missing) // slices.ranks
    own_slice = slice(slices.number * size, (slices.number + 1) * size)
    arguments: dict[str, Any] = {**row_layout.arguments, NAME: slices}
    arguments["input_ids"] = pad(tokens_BW, (0, missing))[:, own_slice]
    positions = arguments.get("position_ids", torch.arange(width, device=tokens_BW.device)[None].expand_as(tokens_BW))
    begins_again = torch.arange(missing, device=positions.device).expand(len(positions), missing)
    arguments["position_ids"] = torch.cat([positions, begins_again], 1)[:, own_slice]
    if missing and "cu_seq_lens_q" in arguments:
        # The padding after the last row is a separate row.
        bounds = pad(arguments["cu_seq_lens_q"], (0, 1), value=width + missing)
        longest = max(arguments["max_length_q"], missing)
        arguments |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    if missing and "attention_mask" in arguments:
        mask = pad(arguments["attention_mask"], (0, missing, 0, missing))
        # Padding sees itself, because attention over no token gives NaN.
        arguments["attention_mask"] = mask | torch.eye(width + missing, dtype=torch.bool, device=mask.device)
    row, place = row_layout.index_BL // width, row_layout.index_BL % width
    here_BL = place // size == slices.number
    return RowLayout(arguments, torch.where(here_BL, row * size + place % size, -1))


def sum_over_slices(column_BT: Tensor, slices: Slices) -> Tensor:
    """Sum `column_BT` over the ranks of `slices`; each entry is nonzero on at most one rank.

    All ranks compute the same loss from the sum, so the gradient of each rank's own entries is complete.
    """
    return column_BT if slices.ranks == 1 else _Sum.apply(column_BT, slices.within)  # pyright: ignore


class _ExchangeSlices(torch.autograd.Function):
    """All-to-all: send each rank its share of dimension `split`; concatenate the received shares along `join`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.dimensions = group, (join, split)
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return _ExchangeSlices.apply(gradient, ctx.group, *ctx.dimensions), None, None, None  # pyright: ignore


class _Sum(torch.autograd.Function):
    """Forward: the sum over ranks. Backward: the gradient, unchanged, for this rank's own entries."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return gradient, None
