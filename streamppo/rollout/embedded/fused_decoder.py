"""A decoder with few operations for llama, qwen2 and qwen3 models; its cache has keys and values in fixed rows.

B rows, P prompt tokens (padded on the right), T cached tokens, C width, H query heads, K key-value heads, D head
width, V vocabulary.

A small model spends more time on launching operations than on arithmetic, so the forward pass has few of them:

- One matrix product computes queries, keys and values; another computes gate and up.
- The rotary embedding is one complex multiplication in place. This needs the two elements of a rotated pair side by
  side, so the rows of the projections are reordered when weights are written. The new order changes no dot product.
- Keys and values are adjacent in the cache and are written together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from streamppo.config.rollout import FAMILIES
from streamppo.process import phase
from streamppo.rollout.embedded import parameters
from streamppo.rollout.embedded.parameters import Layer, Parameters
from streamppo.rollout.embedded.spans import LEAST_ROWS, Span, width
from streamppo.rollout.weight_checks import Architecture, cache_error, check_fit
from streamppo.weights.content import compare, hash_tensor, write
from streamppo.weights.models import classes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SILU = ("silu", "swish")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""Rotary embeddings whose angles depend only on the position, in rows of up to `positions.longest` tokens."""


class _Prefill(NamedTuple):
    """The rows of a prefill; `prompts_N` has the index of each row's prompt."""

    rows_N: Tensor
    prompts_N: Tensor


class _Extension(NamedTuple):
    """An extension of B rows from `first` on: the position and the attention mask [B, 1, P, T] of each new token."""

    first: int
    at_BP: Tensor
    mask: Tensor


class _Decode(NamedTuple):
    """A step: the position of each row's new token, and the spans for attention, each with a mask [b, 1, 1, T]."""

    at_B: Tensor
    spans: Sequence[Span]
    masks: Sequence[Tensor]


class FusedDecoder:
    """Implements `Decoder`. Every token attends to all tokens before it, so a row must fit into the model's window."""

    def __init__(
        self,
        config: "PreTrainedConfig",
        tensors: Mapping[str, Tensor],
        *,
        rows: int,
        dtype: torch.dtype,
        float32_head: bool,
        device: str,
    ) -> None:
        self.config, self.vocabulary = config, config.vocab_size
        self.dtype, self.device = dtype, torch.device(device)
        self.head_dtype = torch.promote_types(dtype, torch.float32) if float32_head else dtype
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_width = max(classes.head_widths(config))
        self._expected = Architecture(config).shapes
        self._spare: Parameters | None = None
        self.stage(tensors)
        self.parameters, self._spare = self._staged(), None
        self.cache = torch.empty((config.num_hidden_layers, rows, 0, 0, 0), dtype=dtype, device=self.device)
        self.rotation_TD = _rotation(config, 0, self.device)

    @property
    def rows(self) -> int:
        return self.cache.shape[1]

    @property
    def room(self) -> int:
        return self.cache.shape[2]

    def reserve(self, room: int) -> None:
        layers, rows, before = self.cache.shape[:3]
        # `room` is rounded up like the number of positions in a span.
        room = width(room)
        shape = (layers, rows, room, 2 * self.kv_heads, self.head_width)
        try:
            cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            token_bytes = math.prod(shape) // (rows * room) * self.dtype.itemsize
            raise cache_error(rows, room, token_bytes) from error
        if before:
            cache[:, :, :before] = self.cache
        self.cache = cache
        self.rotation_TD = _rotation(self.config, room, self.device)

    @phase("swap")
    def stage(self, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None) -> None:
        check_fit(self._expected, tensors)
        if self._spare is None:
            self._spare = parameters.empty(self._expected, self.dtype, self.head_dtype, self.device)
        if contents is None:
            contents = {name: hash_tensor(tensor.to(self.dtype)) for name, tensor in tensors.items()}
        compare(contents, self._write_tensors(self._spare, tensors))

    @torch.no_grad()
    def _write_tensors(self, into: Parameters, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int]]:
        for name, view in parameters.views(into, self._expected.keys(), self.head_width):
            yield name, write(view, tensors[name].to(self.dtype).reshape(view.shape))

    def adopt(self) -> None:
        self._spare, self.parameters = self.parameters, self._staged()

    def _staged(self) -> Parameters:
        assert self._spare is not None, "nothing was staged"
        return self._spare

    @torch.inference_mode()
    def prefill(self, tokens_BP: Tensor, lengths_B: Tensor, rows_N: Tensor, prompts_N: Tensor) -> Tensor:
        hidden_BPC = self._layers(tokens_BP, _Prefill(rows_N, prompts_N))
        last_BC = hidden_BPC[torch.arange(len(lengths_B), device=self.device), lengths_B - 1]
        return self._logits(last_BC).index_select(0, prompts_N)

    @torch.inference_mode()
    def extend(self, tokens_BP: Tensor, starts_B: Tensor, lengths_B: Tensor, first: int, longest: int) -> Tensor:
        B, P = tokens_BP.shape
        # Padding tokens are written after a row's tokens, where the next token overwrites them before any read.
        at_BP = starts_B[:, None] + torch.minimum(torch.arange(P, device=self.device), lengths_B[:, None])
        mask = torch.arange(longest, device=self.device) <= at_BP[:, None, :, None]
        hidden_BPC = self._layers(tokens_BP, _Extension(first, at_BP, mask))
        return self._logits(hidden_BPC[torch.arange(B, device=self.device), lengths_B - 1])

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, at_B: Tensor, spans: Sequence[Span]) -> Tensor:
        hidden_B1C = self._layers(tokens_B[:, None], _Decode(at_B, spans, self._masks(at_B, spans)))
        return self._logits(hidden_B1C[:, 0])

    @torch.inference_mode()
    def copy(self, sources_B: Tensor, targets_B: Tensor, length: int) -> None:
        for layer in self.cache[:, :, :length]:
            # `index_copy_` copies whole rows; assignment by index would copy element by element.
            layer.index_copy_(0, targets_B, layer.index_select(0, sources_B))

    def _masks(self, at_B: Tensor, spans: Sequence[Span]) -> list[Tensor]:
        """Return the attention mask [b, 1, 1, T] of each span: true up to the position of a row's new token."""
        places_T = torch.arange(max(span.longest for span in spans), device=self.device)
        visible_BT = places_T <= at_B[:, None]
        return [visible_BT[span.first : span.end, None, None, : span.longest] for span in spans]

    def _layers(self, tokens_BP: Tensor, work: _Prefill | _Extension | _Decode) -> Tensor:
        parameters, eps = self.parameters, self.config.rms_norm_eps
        B, P = tokens_BP.shape
        C = parameters.norm.shape
        x_BPC = F.embedding(tokens_BP, parameters.embedding)
        rotation = self._rotation_of(work, P)
        for layer, cache in zip(parameters.layers, self.cache, strict=True):
            h_BPC = F.rms_norm(x_BPC, C, layer.norm, eps)
            qkv = _linear(h_BPC, layer.qkv, layer.qkv_bias).view(B, P, -1, self.head_width)
            self._rotate(layer, qkv, rotation)
            attended = self._attend(qkv, cache, work)
            x_BPC = x_BPC + _linear(attended, layer.out, layer.out_bias)
            h_BPC = F.rms_norm(x_BPC, C, layer.mlp_norm, eps)
            gate, up = _linear(h_BPC, layer.gate_up).chunk(2, -1)
            x_BPC = x_BPC + _linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x_BPC, C, parameters.norm, eps)

    def _rotation_of(self, work: _Prefill | _Extension | _Decode, P: int) -> Tensor:
        match work:
            case _Prefill():
                return self.rotation_TD[:P, None]
            case _Extension(at_BP=at_BP):
                return self.rotation_TD[at_BP][:, :, None]
            case _Decode(at_B=at_B):
                return self.rotation_TD[at_B, None, None]

    def _rotate(self, layer: Layer, qkv: Tensor, rotation: Tensor) -> None:
        """Normalise (qwen3) and rotate queries and keys, in place in the fused product."""
        H, K = self.heads, self.kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = self.config.rms_norm_eps
            qkv[..., :H, :] = F.rms_norm(qkv[..., :H, :], layer.q_norm.shape, layer.q_norm, eps)
            qkv[..., H : H + K, :] = F.rms_norm(qkv[..., H : H + K, :], layer.k_norm.shape, layer.k_norm, eps)
        pairs = qkv[..., : H + K, :].unflatten(-1, (-1, 2))
        if qkv.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotation)
        else:
            rotated = torch.view_as_complex(pairs.float().contiguous()) * rotation
            pairs.copy_(torch.view_as_real(rotated))

    def _attend(self, qkv: Tensor, cache: Tensor, work: _Prefill | _Extension | _Decode) -> Tensor:
        B, P = qkv.shape[:2]
        q, kv = qkv[:, :, : self.heads], qkv[:, :, self.heads :]
        if isinstance(work, _Prefill):
            rows_N, prompts_N = work
            cache[:, :P].index_copy_(0, rows_N, kv.index_select(0, prompts_N))
            return self._attention(q, kv, None).reshape(B, P, -1)
        if isinstance(work, _Extension):
            first, at_BP, mask = work
            cache[first : first + B][torch.arange(B, device=self.device)[:, None], at_BP] = kv
            return self._attention(q, cache[first : first + B, : mask.shape[-1]], mask).reshape(B, P, -1)
        cache[torch.arange(B, device=self.device), work.at_B] = kv[:, 0]
        attended = [
            self._attention(q[span.first : span.end], cache[span.first : span.end, : span.longest], mask_b11T)
            for span, mask_b11T in zip(work.spans, work.masks, strict=True)
        ]
        return (attended[0] if len(attended) == 1 else torch.cat(attended)).reshape(B, P, -1)

    def _attention(self, q: Tensor, kv: Tensor, mask_b1PT: Tensor | None) -> Tensor:
        """Compute attention, causal without a mask: [b, P, H, D] and [b, T, 2 K, D] -> [b, P, H, D]."""
        K = self.kv_heads
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            kv[:, :, :K].transpose(1, 2),
            kv[:, :, K:].transpose(1, 2),
            attn_mask=mask_b1PT,
            is_causal=mask_b1PT is None,
            enable_gqa=self.heads != K,
        )
        return attended.transpose(1, 2)

    def _logits(self, hidden_BC: Tensor) -> Tensor:
        head_VC = self.parameters.head
        return _linear(hidden_BC.to(head_VC.dtype), head_VC).float()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` of at least `LEAST_ROWS` rows: for fewer, MKL has other kernels, which round differently."""
    rows = x.numel() // x.shape[-1]
    if rows >= LEAST_ROWS or x.is_cuda:
        return F.linear(x, weight, bias)
    flat = F.pad(x.reshape(rows, -1), (0, 0, 0, LEAST_ROWS - rows))
    return F.linear(flat, weight, bias)[:rows].view(*x.shape[:-1], -1)


def refusal(config: "PreTrainedConfig") -> str:
    """Return the reason why this forward pass would compute a model of `config` wrongly; "" if there is none."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    activation = getattr(config, "hidden_act", "silu")
    problems = {
        f"model_type {config.model_type!r} (known are {', '.join(FAMILIES)})": config.model_type not in FAMILIES,
        f"activation {activation!r}": activation not in SILU,
        "a bias in the MLP": bool(getattr(config, "mlp_bias", False)),
        f"rope type {rope!r}": rope not in ROPE_TYPES,
    }
    return " or ".join(name for name, present in problems.items() if present)


def _rotation(config: "PreTrainedConfig", room: int, device: torch.device) -> Tensor:
    """Tabulate scale * exp(i * position * frequency), [T, D / 2] complex64, with the model's attention scale."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # `LlamaRotaryEmbedding` reads only rope parameters, which have the same names in all `FAMILIES`.
    rope = LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]
    angles_TD = torch.arange(room)[:, None].float() * rope.inv_freq[None].float()
    scale = torch.full_like(angles_TD, float(rope.attention_scaling))
    return torch.polar(scale, angles_TD).to(device)
