"""The memory of a rank, estimated from the model's configuration; 1 to 3 GiB of CUDA and NCCL are not counted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

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
from streamppo.weights.models import classes

MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes for one trained parameter, its gradient and AdamW's two moments: float32, sharded over the ranks."""
LOGITS = 3
"""The number of float32 logits tensors that exist at one time in the backward pass of the head."""
BATCH = 160
"""Bytes that a rank holds between passes for each token of the batch: numbers, metrics and diagnostics."""
BYTE = 256
"""With up to this many experts, an expert's number takes one byte in a token's routes, else two bytes."""
PROBED, LONG_ROW = 64, 256
"""Activations are measured with `PROBED` rows of one token, or with one row of `LONG_ROW` tokens."""


class ModelSizes(NamedTuple):
    """The sizes of a model: numbers of parameters, and bytes per token in the compute type.

    `trained` parameters are not frozen. One transformer layer has `layer` parameters: tensor parallelism splits
    `by_tensor` of them, expert parallelism `by_expert`. `rest` are outside of layers. `widest` is the largest
    activation in a layer. `routes` are a token's experts over all layers. One token uses `active` parameters. Only
    SGLang holds the `encoders` of a multimodal model. Eager attention keeps `scores` for each pair of tokens of a row
    in a layer.
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
    encoders: int = 0
    scores: int = 0

    @property
    def rest(self) -> int:
        return self.parameters - self.layers * self.layer

    @property
    def body(self) -> int:
        return self.parameters - self.head


class RankMemory(NamedTuple):
    """Bytes of one rank. Memory for `head` is freed before `layer` is needed: `parts` has only the larger."""

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
        smaller = "head" if self.head < self.layer else "layer"
        return {name: size for name, size in self._asdict().items() if name != smaller}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def sizes(hf_config: PretrainedConfig, model: Model) -> ModelSizes:
    """Build the model of `hf_config` on the meta device, which takes no memory, and count its sizes.

    Raises `ModelError` for a model without `layers` that have separate keys and values, as in llama, and for a model
    that cannot run on the meta device.
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
        attends = "sdpa" if attention.has_sdpa(text) and model.attention != "eager" else "eager"
        # Without dropout, as in an update.
        lm = classes.make(hf_config, dtype=dtype, attn_implementation=attends).eval()
        if model.lora is not None:
            adapters.add(lm, model.lora, model.dtype)
    body, name = parent_of_layers(lm.base_model)
    layers = getattr(body, name)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    pair = 2 * heads * max(classes.head_widths(text))
    parameters, other = _count(lm), sum(map(_count, getattr(lm, "other_parts", ())))
    head = parameters - _count(lm.base_model) - other
    whole = _count(classes.make(hf_config, whole=True, dtype=dtype)) if classes.is_multimodal(hf_config) else parameters
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
        encoders=max(0, whole - parameters),
        scores=(attends == "eager") * text.num_attention_heads * dtype.itemsize,
        active=parameters - (len(layers) * by_expert * (experts - chosen) // experts if chosen else 0),
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _activations(body: Any, name: str) -> tuple[int, int]:
    """The bytes per token that a layer keeps for the backward pass: of all tensors, and of the largest tensor."""
    # Rows of one token show what attention keeps for each token. Layers with a recurrent state fill every row up to a
    # chunk, so they need a long row. Some of these layers run on the meta device with only one of the two kinds of row.
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
    """The bytes of one layer are the difference between a model of two layers and a model of one layer."""
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
    parameters = {parameter.untyped_storage()._cdata for parameter in body.parameters()}
    # Keeping the storages themselves prevents a freed address from being used again.
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage
        return tensor

    tokens = torch.zeros(rows, width, dtype=torch.long, device="meta")
    # Rows of one token need a mask. A long row has no mask, because layers with a recurrent state cannot read it here.
    mask = torch.ones(rows, 1, 1, 1, dtype=torch.bool, device="meta") if width == 1 else None
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, FusedMode(), attention.without_packing_search():
        body(input_ids=tokens, attention_mask=mask, use_cache=False)
    return [storage.nbytes() for storage in storages.values()]


class FusedMode(TorchFunctionMode):
    """Counts the tensors that fused attention and products of experts keep.

    On the meta device, torch would use the unfused formula of attention, and refuses products in float32.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])
        if func is torch._grouped_mm:
            return _GroupedProduct.apply(*args[:2])
        return func(*args, **(kwargs or {}))


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, attended)
        return attended


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, experts)
        return rows.new_empty(*rows.shape[:-1], experts.shape[-1])


def rank(config: Config, model: ModelSizes, longest: int) -> RankMemory:
    """The memory of one learner rank; `longest` is the longest row in tokens.

    A separate critic, which trains after the policy, and a teacher are assumed to be as large as the policy.

    state        float32 weights, gradients and moments of trained parameters, and frozen weights, divided by the ranks;
                 0 if they are offloaded
    gathered     two layers' weights in the compute type, as far as they are not cut between ranks, and all weights
                 outside of layers (of a small model: all weights); their gradients, and the float32 gradients on their
                 way to other ranks. A single rank instead has a copy of trained weights in the compute type, unless
                 that is float32
    activations  of the rank's slice of the micro-batch in every layer, or with checkpointing the input to each layer;
                 with tensor parallelism the slices that a rank gathers twice; the keys and values of shared prompts,
                 repeated for each of their samples
    mask         with agents, whose rows are trees: the tokens that each token sees, and a copy in the compute type that
                 attention keeps in every layer, or with checkpointing in one layer; 0 where paths are less work
    head         logits, their gradient and the head's gradient; on a CPU also a float32 copy of the head
    layer        later in the backward pass, with checkpointing: one layer's activations and two layers' gradients; on a
                 rank alone the gradient of weights outside of layers, to which the embedding adds at the end
    reference    the shards of each frozen policy (reference, teacher); weights gathered for its pass are freed before
                 there are gradients
    batch        all rows of the batch, which every rank holds between passes; the experts of one pass's tokens, and on
                 a CPU those of the rank's rows
    """
    learner, mesh, own_critic = config.learner, config.learner.mesh, critic_body(config, model)
    is_small = model.parameters + own_critic <= SHARD_LAYERS_ABOVE
    kept_of_layer = model.layer - model.by_tensor + model.by_tensor // mesh.tensor
    kept_of_layer -= model.by_expert - model.by_expert // mesh.expert
    gathered_parameters = model.rest + (model.layers if is_small else 2) * kept_of_layer
    # Only trained parameters have gradients; `gradients` is their share of all parameters.
    gradients = model.trained / model.parameters
    reduced = gradients * (gathered_parameters if is_small else max(model.rest, kept_of_layer))
    gathered = int((1 + gradients) * gathered_parameters * model.element + MASTER * reduced)
    if is_alone := is_whole(learner.ranks, offload=learner.offload):
        gathered = (model.element < MASTER) * model.element * (model.trained + own_critic)
    tokens = -(-max(learner.micro_batch_tokens, longest) // mesh.slices)
    kind, layer_input = config.model.gradient_checkpointing, model.hidden * model.element
    scores = 0 if _is_joined(config, model) else model.scores * longest
    per_layer = model.activations_per_layer + scores + 2 * (mesh.tensor - 1) * layer_input
    keeps_all = kind in ("off", "auto")
    layers = tokens * model.layers * (per_layer if keeps_all else layer_input * (kind != "offloaded"))
    keys = _repeated_keys(config, model, tokens, longest)
    reference, teacher = config.algorithm.kl, config.algorithm.teacher
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
        reference=frozen * model.parameters // mesh.shards(learner.ranks),
        batch=config.queue.batch_size * longest * BATCH
        + (tokens * model.routes if config.rollout.engine.routes else 0)
        + (0 if learner.gpus else routes(config, model, longest)),
    )


def routes(config: Config, model: ModelSizes, longest: int) -> int:
    """The bytes in host memory of the experts recorded for a rank's rows."""
    rows = -(-config.queue.batch_size * config.learner.mesh.slices // config.learner.ranks)
    return rows * longest * model.routes if config.rollout.engine.routes else 0


def _tree_mask(config: Config, model: ModelSizes, tokens: int, longest: int) -> int:
    """The bytes of the attention mask of rows that are trees, which agents produce; 0 if attention is not SDPA."""
    is_sdpa = config.model.attention in ("sdpa", "auto") and not _is_joined(config, model)
    if not isinstance(config.environment, AgentEnvironment) or not is_sdpa:
        return 0
    copies = model.layers if config.model.gradient_checkpointing in ("off", "auto") else 1
    return tokens * longest * (1 + model.element * copies)


def _repeated_keys(config: Config, model: ModelSizes, tokens: int, longest: int) -> int:
    """The bytes of keys and values that are repeated for samples of a prompt, if rows lie end to end.

    For rows of equal length: n samples of P prompt and T completion tokens have P + n (P + T) keys instead of P + n T.
    """
    # Prompts are not shared in mixtures of experts, nor by ranks that hold slices of rows.
    shares = config.model.share_prompts and not model.by_expert and config.learner.mesh.slices == 1
    if not shares or not _is_joined(config, model):
        return 0
    samples, completion = config.queue.samples_per_prompt, longest_completion(config)
    prompt = longest - completion
    repeated = (prompt + samples * longest) / (prompt + samples * completion) - 1
    return int(tokens * repeated * model.cache_per_token)


def _is_joined(config: Config, model: ModelSizes) -> bool:
    """True if attention is over rows end to end: every kernel for such rows computes in 16 bits on a GPU."""
    kind = config.model.attention
    return kind in JOINED or (kind == "auto" and config.learner.gpus > 0 and model.element < MASTER)


def _head(config: Config, model: ModelSizes, tokens: int) -> int:
    """The head's bytes, with the logits of a chunk on a CPU, or of a piece on a GPU, where the head has kernels."""
    if not config.learner.gpus:
        copies = 2 * config.model.float32_head
        return model.vocabulary * 4 * (min(HEAD_CHUNK, tokens) * LOGITS + model.hidden * copies)
    # Logits take 4 bytes. The gradients of logits and of hidden states are one float32 or two 16-bit parts.
    return min(PIECE, tokens * model.vocabulary) * 8 + model.hidden * (model.vocabulary * model.element + tokens * 16)


def state(config: Config, model: ModelSizes) -> int:
    """The bytes of a rank's weights, gradients and moments, on its GPU or in host memory."""
    frozen = (model.parameters - model.trained) * model.element
    trained = (model.trained + critic_body(config, model)) * (MASTER + GRADIENT + MOMENTS)
    return (trained + frozen) // config.learner.mesh.shards(config.learner.ranks)


def critic_body(config: Config, model: ModelSizes) -> int:
    """The parameters of a critic with its own transformer, without the value head; 0 if the critic is a head."""
    return model.body if config.algorithm.critic.model != "head" else 0
