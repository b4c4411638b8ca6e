"""The memory of a rank, computed from the model's configuration before anything is loaded.

Estimates: allocators round up, and 1 to 3 GiB of CUDA and NCCL are not counted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from streamppo.algorithms.chunked_head import PIECE
from streamppo.config.model import JOINED, Model
from streamppo.config.sections import Config, longest_completion
from streamppo.config.task import AgentEnvironment
from streamppo.errors import ModelError
from streamppo.learner.attention import attention
from streamppo.learner.attention.layers import parent_of_layers
from streamppo.learner.model import adapters
from streamppo.learner.model.load_policy import SHARD_LAYERS_ABOVE, is_whole
from streamppo.learner.model.policy import HEAD_CHUNK
from streamppo.learner.parallel import tensor_parallel
from streamppo.learner.parallel.routing import experts_of

MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes of a trained parameter, its gradient and AdamW's two moments: float32, and sharded over the ranks."""
LOGITS = 3
"""Float32 tensors of logits in memory at one time, in the backward pass of the head."""
BATCH = 160
"""Bytes of a rank for each token of the batch, between the passes: numbers, metrics and diagnostics."""
BYTE = 256
"""The most experts whose numbers take one byte in a token's routes; with more, a number takes two."""
PROBED, LONG_ROW = 64, 256
"""Rows of one token, and tokens of one row, with which activations are measured."""


class ModelSizes(NamedTuple):
    """The sizes of a model: numbers of parameters, of which `trained` are not frozen, and bytes of one token in the
    compute type.

    `layer` is one transformer layer; tensor and expert parallelism split `by_tensor` and `by_expert` of it. `rest` is
    everything outside of the layers: embeddings, norm, head. `widest` is a layer's largest activation.
    `routes` are the bytes of a token's experts, of all layers. `active` is the number of parameters used for one token.
    """

    parameters: int
    trained: int
    layers: int
    layer: int
    by_tensor: int
    by_expert: int
    hidden: int
    vocabulary: int
    head: int
    element: int
    cache_per_token: int
    activations_per_layer: int
    widest: int
    routes: int
    active: int

    @property
    def rest(self) -> int:
        """Parameters outside of the layers."""
        return self.parameters - self.layers * self.layer

    @property
    def body(self) -> int:
        """Parameters of the transformer without its head."""
        return self.parameters - self.head


class RankMemory(NamedTuple):
    """Bytes of one rank. `head` and `layer` are never in memory together: a backward pass begins with the head."""

    state: int
    gathered: int
    activations: int
    mask: int
    head: int
    layer: int
    reference: int
    batch: int

    @property
    def parts(self) -> dict[str, int]:
        """The parts in memory at the peak, by name."""
        smaller = "head" if self.head < self.layer else "layer"
        return {name: size for name, size in self._asdict().items() if name != smaller}

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.parts.values())


def sizes(hf_config: PretrainedConfig, model: Model) -> ModelSizes:
    """Build the model of `hf_config` without memory and count.

    Raises `ModelError` for a model that is not like llama, `layers` with separate keys and values, or that cannot run
    on the meta device.
    """
    try:
        return _sizes(hf_config, model)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"the memory of a rank and an engine is unknown for a {type(hf_config).__name__}: {error}"
        ) from error


def _sizes(hf_config: PretrainedConfig, model: Model) -> ModelSizes:
    dtype, text = getattr(torch, model.dtype), hf_config.get_text_config()
    with torch.device("meta"):
        attends = "sdpa" if attention.has_sdpa(text) else "eager"
        lm: Any = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=attends)
        if model.lora is not None:
            adapters.add(lm, model.lora, model.dtype)
    body, name = parent_of_layers(lm.base_model)
    layers = getattr(body, name)
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pair = 2 * text.num_key_value_heads * head_width
    parameters, head = _count(lm), _count(lm) - _count(lm.base_model)
    by_tensor, by_expert = tensor_parallel.cut_parameters(body, layers[0])
    activations, widest = _activations(body, name)
    experts, chosen = experts_of(text), getattr(text, "num_experts_per_tok", 0) if by_expert else 0
    return ModelSizes(
        parameters=parameters,
        trained=sum(parameter.numel() for parameter in lm.parameters() if parameter.requires_grad),
        layers=len(layers),
        layer=_count(layers[0]),
        by_tensor=by_tensor,
        by_expert=by_expert,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        head=head,
        element=dtype.itemsize,
        cache_per_token=len(layers) * pair * dtype.itemsize,
        activations_per_layer=activations,
        widest=widest,
        routes=len(layers) * chosen * (1 if experts <= BYTE else 2),
        active=parameters - (len(layers) * by_expert * (experts - chosen) // experts if chosen else 0),
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _activations(body: Any, name: str) -> tuple[int, int]:
    """(all bytes, bytes of the largest tensor) that a layer keeps of one token for the backward pass.

    `name` is the attribute of `body` with its layers. The bytes are those of two layers minus those of one.
    """
    # A row of one token shows what attention keeps of each. Layers that carry a state fill every row up to a chunk,
    # and show it in a long row; some of them run on the meta device with only one of the two kinds of row.
    try:
        of_token = _activations_in_rows(body, name, PROBED, 1)
    except (RuntimeError, ValueError):
        return _activations_in_rows(body, name, 1, LONG_ROW)
    try:
        in_long_row = _activations_in_rows(body, name, 1, LONG_ROW)
    except (RuntimeError, ValueError):
        return of_token
    return in_long_row if 2 * in_long_row[0] < of_token[0] else of_token


def _activations_in_rows(body: Any, name: str, rows: int, width: int) -> tuple[int, int]:
    all_layers, measured = getattr(body, name), list[list[int]]()
    try:
        for count in (1, 2):
            setattr(body, name, all_layers[:count])
            body.config.num_hidden_layers = count
            measured.append(_activation_bytes(body, rows, width))
    finally:
        setattr(body, name, all_layers)
        body.config.num_hidden_layers = len(all_layers)
    return (sum(measured[1]) - sum(measured[0])) // (rows * width), max(measured[0]) // (rows * width)


def _activation_bytes(body: torch.nn.Module, rows: int, width: int) -> list[int]:
    """Bytes of each tensor that a forward pass over `rows` of `width` tokens keeps, without parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in body.parameters()}
    # The storages themselves are held, so that no address is used twice.
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Fused():
        _pass(body, rows, width)
    return [storage.nbytes() for storage in storages.values()]


def _pass(body: torch.nn.Module, rows: int, width: int) -> None:
    """Call `body` with tensors on the meta device: nothing is allocated."""
    tokens = torch.zeros(rows, width, dtype=torch.long, device="meta")
    # A row of one token needs a mask, and layers that carry a state could not read one of a long row here.
    seen = torch.ones(rows, 1, 1, 1, dtype=torch.bool, device="meta") if width == 1 else None
    with attention.without_packing_search():
        body(input_ids=tokens, attention_mask=seen, use_cache=False)


class Fused(TorchFunctionMode):
    """Counts attention as in flash-attn and SDPA's fused kernels; on the meta device torch uses the plain formula."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run `func`, or `_Kept` in place of SDPA."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _Kept.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, attended)
        return attended


def rank(config: Config, model: ModelSizes, longest: int) -> RankMemory:
    """One learner rank, where `longest` is the longest row in tokens.

    A separate critic, trained after the policy, and a teacher are assumed to be as large.

    state        float32 weights, gradients and moments of what is trained, and frozen weights, over all ranks; none
                 of it if that is offloaded
    gathered     weights in the compute type of two layers, as far as they are not cut between ranks, and of all that
                 is in no layer (a small model: all of it); their gradients, and those in float32 on their way to the
                 ranks. Of a rank alone a copy of what is trained in the compute type; in float32 nothing
    activations  of the rank's slice of the micro-batch in every layer, or with checkpointing its input to each;
                 with tensor parallelism the slices that a rank gathers twice; the keys and values of shared prompts,
                 which each of their samples has
    mask         with agents, whose rows are trees: the tokens that each token sees, and their copy in the compute type
                 that attention keeps in every layer, or with checkpointing in one; where paths are less work, nothing
    head         logits, their gradient and the head's own; on a CPU the head's float32 copy as well
    layer        later in the backward pass: with checkpointing one layer's activations and the gradients of two; of a
                 rank alone the gradient of what is in no layer, to which the embedding adds at the end
    reference    the shards of each frozen policy, reference and teacher; the weights that its pass gathers are freed
                 before there are gradients
    batch        all rows of the batch, which every rank holds whole between its passes; the experts of a pass's tokens,
                 and on a CPU those of its rows
    """
    learner, critic_body = config.learner, _critic_body(config, model)
    small = model.parameters + critic_body <= SHARD_LAYERS_ABOVE
    mesh = learner.mesh
    kept_of_layer = model.layer - model.by_tensor + model.by_tensor // mesh.tensor
    kept_of_layer -= model.by_expert - model.by_expert // mesh.expert
    gathered_parameters = model.rest + (model.layers if small else 2) * kept_of_layer
    # Only trained parameters have gradients: this is their share of all parameters.
    gradients = model.trained / model.parameters
    reduced = gradients * (gathered_parameters if small else max(model.rest, kept_of_layer))
    gathered = int((1 + gradients) * gathered_parameters * model.element + MASTER * reduced)
    if is_alone := is_whole(learner.ranks, offload=learner.offload):
        gathered = (model.element < MASTER) * model.element * (model.trained + critic_body)
    tokens = -(-max(learner.micro_batch_tokens, longest) // mesh.slices)
    per_layer = model.activations_per_layer + 2 * (mesh.tensor - 1) * model.hidden * model.element
    kind, layer_input = config.model.gradient_checkpointing, model.hidden * model.element
    keeps_all = kind in ("off", "auto")
    layers = tokens * model.layers * (per_layer if keeps_all else layer_input * (kind != "offloaded"))
    keys = _repeated_keys(config, model, tokens, longest)
    reference, teacher, shards = config.algorithm.kl, config.algorithm.teacher, mesh.shards(learner.ranks)
    is_second = reference.on and not reference.offload and config.model.lora is None
    # A moving reference is kept in float32, other frozen models in the compute type.
    frozen = is_second * (MASTER if reference.follow_every else model.element)
    frozen += (bool(teacher.model) and not teacher.offload) * model.element
    return RankMemory(
        state=0 if learner.offload else state(config, model),
        gathered=gathered,
        activations=layers + keys * keeps_all,
        mask=_tree_mask(config, model, tokens, longest),
        head=_head(config, model, tokens),
        layer=(tokens * (per_layer + 2 * model.widest) + keys // model.layers) * (not keeps_all)
        + is_alone * int(gradients * model.rest * model.element),
        reference=frozen * model.parameters // shards,
        batch=config.queue.batch_size * longest * BATCH
        + (tokens * model.routes if config.rollout.engine.routes else 0)
        + (0 if learner.gpus else routes(config, model, longest)),
    )


def routes(config: Config, model: ModelSizes, longest: int) -> int:
    """Bytes of the experts of a rank's rows, in host memory."""
    rows = -(-config.queue.batch_size * config.learner.mesh.slices // config.learner.ranks)
    return rows * longest * model.routes if config.rollout.engine.routes else 0


def _tree_mask(config: Config, model: ModelSizes, tokens: int, longest: int) -> int:
    """The mask of tree rows, which agents produce, if SDPA computes them."""
    is_sdpa = config.model.attention in ("sdpa", "auto") and not _is_joined(config, model)
    if not isinstance(config.environment, AgentEnvironment) or not is_sdpa:
        return 0
    copies = model.layers if config.model.gradient_checkpointing in ("off", "auto") else 1
    return tokens * longest * (1 + model.element * copies)


def _repeated_keys(config: Config, model: ModelSizes, tokens: int, longest: int) -> int:
    """Keys and values of all layers beyond one for each token, if rows lie end to end and are as long as the longest.

    P prompt tokens and n samples with T tokens of their own have P + n (P + T) keys in place of P + n T.
    """
    # Mixtures of experts share no prompts, nor do ranks with slices of rows.
    shares = config.model.share_prompts and not model.by_expert and config.learner.mesh.slices == 1
    if not shares or not _is_joined(config, model):
        return 0
    samples, completion = config.queue.samples_per_prompt, longest_completion(config)
    prompt = longest - completion
    repeated = (prompt + samples * longest) / (prompt + samples * completion) - 1
    return int(tokens * repeated * model.cache_per_token)


def _is_joined(config: Config, model: ModelSizes) -> bool:
    """True if attention is over rows end to end: every kernel for them computes in 16 bits on a GPU."""
    chosen = config.model.attention
    return chosen in JOINED or (chosen == "auto" and config.learner.gpus > 0 and model.element < MASTER)


def _head(config: Config, model: ModelSizes, tokens: int) -> int:
    """Logits of a chunk and the head in float32; on a GPU, whose head has kernels, the logits of a piece."""
    if not config.learner.gpus:
        copies = 2 * config.model.float32_head
        return model.vocabulary * 4 * (min(HEAD_CHUNK, tokens) * LOGITS + model.hidden * copies)
    # Logits are of 4 bytes; their gradient, and that of hidden states, are a float32 in one part or two.
    return min(PIECE, tokens * model.vocabulary) * 8 + model.hidden * (model.vocabulary * model.element + tokens * 16)


def state(config: Config, model: ModelSizes) -> int:
    """Bytes of a rank's weights, gradients and moments, on its GPU or in host memory."""
    frozen = (model.parameters - model.trained) * model.element
    trained = (model.trained + _critic_body(config, model)) * (MASTER + GRADIENT + MOMENTS)
    return (trained + frozen) // config.learner.mesh.shards(config.learner.ranks)


def _critic_body(config: Config, model: ModelSizes) -> int:
    """The number of parameters of a critic with a separate transformer."""
    return model.body if config.algorithm.critic.model != "head" else 0
