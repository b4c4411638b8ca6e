"""A decoder that runs transformers' modules; only their attention is replaced (row_attention.py).

B rows, P new tokens (padded on the right), L tokens of a row, C width, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from streamppo.errors import ModelError
from streamppo.process import phase
from streamppo.rollout import positions
from streamppo.rollout.embedded import row_attention
from streamppo.rollout.embedded.row_attention import AttentionPass, RowCache
from streamppo.rollout.embedded.spans import LEAST_ROWS, Span, width
from streamppo.rollout.weight_checks import cache_error, check_fit
from streamppo.weights.content import compare, hash_tensor, write
from streamppo.weights.models import classes, fit, loading
from streamppo.weights.models.settings import naming

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROBED = (4, 2, 1)
"""Numbers of tokens in the passes that compare a new decoder with the model: a prefill, an extension, a step."""


class ModelDecoder:
    """Implements `Decoder` for models without `refusal`. Raises `ModelError` if its logits differ from the model's."""

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
        self.device = torch.device(device)
        self.vocabulary: int = config.get_text_config().vocab_size
        self._kind, self._dtype, self._window = config.model_type, dtype, positions.window(config) or 0
        self._model = _without_weights(config, dtype, self.device)
        self._expected = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        self._parameters = self._parameters_of(torch.promote_types(dtype, torch.float32) if float32_head else dtype)
        self._spare: dict[str, list[Tensor]] = {}
        self._cache = RowCache(rows)
        self._last_B: Tensor | None = None
        self.stage(tensors)
        self.adopt()
        # The first version has replaced this memory, which never had values: free it.
        self._spare = {}
        self._compare_with_model()

    def _parameters_of(self, head_dtype: torch.dtype) -> dict[str, list[torch.nn.Parameter]]:
        """Return the parameters that hold each tensor: two for an embedding whose tied head has another dtype."""
        head = self._model.get_output_embeddings()
        head.register_forward_pre_hook(lambda _, arguments: (self._select(arguments[0]).to(head_dtype),))
        parameters = {name: [parameter] for name, parameter in self._model.named_parameters()}
        if head_dtype == self._dtype:
            return parameters
        embedding = self._model.get_input_embeddings().weight
        names = {id(parameter): name for name, (parameter,) in parameters.items()}
        for kind, before in list(head.named_parameters(recurse=False)):
            after = torch.nn.Parameter(torch.empty_like(before, dtype=head_dtype), requires_grad=False)
            setattr(head, kind, after)
            parameters[names[id(before)]] = [before, after] if before is embedding else [after]
        return parameters

    @property
    def rows(self) -> int:
        return self._cache.rows

    @property
    def room(self) -> int:
        return self._cache.room

    def reserve(self, room: int) -> None:
        if room <= self.room:
            return
        room = width(room)
        try:
            self._cache.enlarge(room)
        except RuntimeError as error:
            raise cache_error(self.rows, room, self._cache.token_bytes) from error

    @phase("swap")
    def stage(self, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None) -> None:
        check_fit(self._expected, tensors)
        if not self._spare:
            self._spare = {
                name: [torch.empty_like(parameter) for parameter in parameters]
                for name, parameters in self._parameters.items()
            }
        if contents is None:
            contents = {name: hash_tensor(tensor.to(self._dtype)) for name, tensor in tensors.items()}
        compare(contents, self._write_tensors(self._spare, tensors))

    @torch.no_grad()
    def _write_tensors(
        self, into: Mapping[str, Sequence[Tensor]], tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, int]]:
        for name, targets in into.items():
            for target in targets:
                yield name, write(target, tensors[name].to(self._dtype))

    def adopt(self) -> None:
        for name, parameters in self._parameters.items():
            for number, parameter in enumerate(parameters):
                self._spare[name][number], parameter.data = parameter.data, self._spare[name][number]

    @torch.inference_mode()
    def prefill(self, tokens_BP: Tensor, lengths_B: Tensor, rows_N: Tensor, prompts_N: Tensor) -> Tensor:
        at_BP = torch.arange(tokens_BP.shape[1], device=self.device).expand(tokens_BP.shape)
        attention_pass = AttentionPass(self._cache, at_BP, copies=(rows_N, prompts_N))
        return self._logits(tokens_BP, at_BP, lengths_B - 1, attention_pass).index_select(0, prompts_N)

    @torch.inference_mode()
    def extend(self, tokens_BP: Tensor, starts_B: Tensor, lengths_B: Tensor, first: int, longest: int) -> Tensor:
        B, P = tokens_BP.shape
        # Padding tokens are written after a row's tokens, where the next token overwrites them before any read.
        at_BP = starts_B[:, None] + torch.minimum(torch.arange(P, device=self.device), lengths_B[:, None])
        attention_pass = AttentionPass(self._cache, at_BP, first=first, spans=[Span(0, B, longest)])
        return self._logits(tokens_BP, at_BP, lengths_B - 1, attention_pass)

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, at_B: Tensor, spans: Sequence[Span]) -> Tensor:
        attention_pass = AttentionPass(self._cache, at_B[:, None], spans=spans)
        return self._logits(tokens_B[:, None], at_B[:, None], torch.zeros_like(at_B), attention_pass)

    @torch.inference_mode()
    def copy(self, sources_B: Tensor, targets_B: Tensor, length: int) -> None:
        self._cache.copy(sources_B, targets_B, length)

    def _logits(self, tokens_BP: Tensor, at_BP: Tensor, last_B: Tensor, attention_pass: AttentionPass | None) -> Tensor:
        """Return the logits [B, V] after token `last_B` of each row. None is transformers' own attention."""
        B, P = tokens_BP.shape
        padding = max(0, math.ceil(LEAST_ROWS / P) - B)
        tokens, at = F.pad(tokens_BP, (0, 0, 0, padding)), F.pad(at_BP, (0, 0, 0, padding))
        self._last_B = F.pad(last_B, (0, padding))
        arguments = {} if attention_pass is None else {"attention_pass": attention_pass}
        try:
            logits_B1V = self._model(input_ids=tokens, position_ids=at, use_cache=False, **arguments).logits
        finally:
            self._last_B = None
        return logits_B1V[:B, 0].float()

    def _select(self, hidden_BPC: Tensor) -> Tensor:
        assert self._last_B is not None, "the head belongs to a pass"
        return hidden_BPC[torch.arange(len(hidden_BPC), device=self.device), self._last_B][:, None]

    @torch.inference_mode()
    def _compare_with_model(self) -> None:
        windows, B, L = set[int](), min(2, self.rows), sum(PROBED)
        tokens_BL, ends = (
            torch.arange(B * L, device=self.device).view(B, L) % self.vocabulary,
            np.cumsum(PROBED).tolist(),
        )
        with fit.quiet(), naming(self._kind):
            self._model.set_attn_implementation("eager")
            expected = torch.stack([self._own_logits(tokens_BL[:, :end]) for end in ends])
            self._model.set_attn_implementation(row_attention.register(windows.add))
        self.reserve(L)
        rows, full_B = torch.arange(B, device=self.device), torch.full((B,), 1, device=self.device)
        prompts, more, last = tokens_BL.split(PROBED, 1)
        spans = [Span(0, B, L)]
        logits = torch.stack(
            [
                self.prefill(prompts, full_B * PROBED[0], rows, rows),
                self.extend(more, full_B * PROBED[0], full_B * PROBED[1], 0, ends[1]),
                self.step(last[:, 0], full_B * ends[1], spans),
            ]
        )
        row_attention.register()
        # Some models also make masks that no layer uses. So only the window of the configuration is checked.
        if self._window and self._window in windows - self._cache.windows:
            raise ModelError(
                f"the embedded engine does not run {self._kind} models with a sliding window of {self._window} tokens, "
                "which transformers does not pass to their attention: use another rollout.engine"
            )
        gap = (logits - expected).abs().max().item()
        # If `gap` is a NaN, `gap > ...` would be False.
        if not gap <= torch.finfo(self._dtype).eps ** 0.5 * max(1.0, expected.abs().max().item()):
            raise ModelError(
                f"the embedded engine does not compute a {self._kind} as transformers does: logits differ by "
                f"{gap:.2g}; use another rollout.engine"
            )

    def _own_logits(self, tokens_BP: Tensor) -> Tensor:
        B, P = tokens_BP.shape
        at_BP = torch.arange(P, device=self.device).expand(B, P)
        return self._logits(tokens_BP, at_BP, torch.full((B,), P - 1, device=self.device), None)


def refusal(config: "PreTrainedConfig") -> str:
    """Return the part of a model of `config` that this decoder does not compute; "" if there is none."""
    model, text = classes.causal_class(config), config.get_text_config()
    kind = f"model_type {text.model_type!r}"
    if model is None:
        return f"{kind}, which is no causal language model"
    if getattr(model, "_is_stateful", False):
        return f"{kind}, whose layers carry a state besides keys and values"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{kind}, whose attention transformers does not let others replace"
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - set(row_attention.LAYERS)):
        return f"{kind} with layers of kind {', '.join(others)}"
    return ""


def _without_weights(config: "PreTrainedConfig", dtype: torch.dtype, device: torch.device) -> Any:
    """Make the model's modules with this file's attention and stored buffers; parameters have memory, but no values."""
    from transformers.initialization import no_init_weights

    with fit.quiet(), naming(config.name_or_path or config.model_type), no_init_weights():
        model = classes.make(config, dtype=dtype, attn_implementation=row_attention.register())
    model.tie_weights()
    for name, buffer in loading.stored_buffers(config).items():
        parent, _, own_name = name.rpartition(".")
        model.get_submodule(parent).register_buffer(own_name, buffer)
    return model.eval().requires_grad_(False).to(device)
