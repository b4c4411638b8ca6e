"""Routing in mixtures of experts: replay of the engine's choice of experts, and the load of each expert.

    own         the router's choice: the k experts with the largest scores
    replayed    the engine's choice when it sampled the token (Rollout Routing Replay, R3, arXiv 2510.11370,
                section 4): the learner computes the scores and their gradient, and only the choice is the engine's

N tokens of a pass, X experts, k of them for a token, E = layers * k entries of a token's routes.

A router runs unchanged, except that its call to `torch.topk` returns the engine's choice. The replay keeps each
family's own arithmetic on scores before and after the call.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from streamppo.errors import ModelError
from streamppo.learner.attention.attention import RowLayout
from streamppo.learner.batch.routes import RowRoutes
from streamppo.learner.device import add_up, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHOICES: tuple[Callable[..., object], ...] = (torch.topk, Tensor.topk)


class Routers:
    """The routers of one transformer; in a model without experts there are none, and every call does nothing.

    The routes given to `expect` stay in effect until its next call, also for a layer that the backward pass recomputes.
    If `counts` is False, `metrics` does not count the tokens of a pass.
    """

    def __init__(self, transformer: "PreTrainedModel | None") -> None:
        self.counts = True
        self._routers = [
            Router(module, int(layer[1]))
            for name, module in (() if transformer is None else choosers(transformer))
            if (layer := re.search(r"\.?(\d+)\.", name))
        ]

    def __bool__(self) -> bool:
        return bool(self._routers)

    def expect(self, row_layout: RowLayout, width_B: Tensor, routes: RowRoutes | None) -> None:
        """Give each router the experts in `routes` for a pass over `row_layout`, rows of `width_B` tokens.

        `width_B` must be in host memory. Raises `ModelError` if the routes do not fit the model.
        """
        if not self._routers:
            return
        index_BL, tokens_BL = row_layout.index_BL, row_layout.arguments["input_ids"]
        real_BL = (torch.arange(index_BL.shape[1]) < width_B[:, None]) & (index_BL >= 0)
        tokens, index_M = tokens_BL.numel(), index_BL[real_BL]
        real_N = torch.zeros(tokens, dtype=torch.bool)
        real_N[index_M] = self.counts
        real_N, known_routes, highest = to_device(real_N, tokens_BL.device), None, -1
        if routes is not None:
            # A token that is computed several times gets the same experts each time.
            entry_N = row_layout.source_N
            if entry_N is None:
                entry_N = torch.full((tokens,), -1)
                entry_N[index_M] = real_BL.flatten().nonzero()[:, 0]
            width = index_BL.shape[1]
            columns = routes.at(entry_N.clamp(min=0) // width, torch.where(entry_N < 0, -1, entry_N % width))
            known_routes = KnownRoutes(*(to_device(column, tokens_BL.device) for column in columns))
            highest = routes.largest
        for router in self._routers:
            router.expect(known_routes, highest, real_N)

    def metrics(self, device: torch.device) -> dict[str, float]:
        """The load of the experts over all passes since the last call. A collective."""
        if not self._routers:
            return {}
        counts = torch.stack([router.take_counts().to(device) for router in self._routers])
        add_up(counts)
        counts_LX, replayed_L2 = counts[:, :-2], counts[:, -2:]
        share_LX = counts_LX / counts_LX.sum(-1, keepdim=True).clamp(min=1)
        equal, replayed = replayed_L2.sum(0).tolist()
        return {
            "expert_load": share_LX.max(-1).values.mean().item() * share_LX.shape[1],
            "experts_idle": (counts_LX == 0).double().mean().item(),
            **({"routes_own": equal / replayed} if replayed else {}),
        }


class KnownRoutes(NamedTuple):
    """Expert `numbers` [N, entries] of a pass's tokens, in all layers or one; `known_N` is True where recorded."""

    numbers: Tensor
    known_N: Tensor


class Pass(NamedTuple):
    """A router's routes for a pass, None without replay; `real_N` is True for tokens that the metrics count."""

    routes: KnownRoutes | None
    real_N: Tensor


class Router:
    """One router: the module that chooses the experts of layer `layer`."""

    def __init__(self, module: Any, layer: int) -> None:
        self.experts, self.top_k = experts_of(module), int(module.top_k)
        self._layer = layer
        self._pass: Pass | None = None
        self._counts: Tensor | None = None
        self._replay_modes: list[_ReplayMode] = []
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def expect(self, routes: KnownRoutes | None, highest: int, real_N: Tensor) -> None:
        """Set the routes of the next pass, as in `Routers.expect`; no expert's number is above `highest`."""
        layer_routes = None
        if routes is not None:
            begin = self._layer * self.top_k
            layer_routes = KnownRoutes(routes.numbers[:, begin : begin + self.top_k], routes.known_N)
            if layer_routes.numbers.shape[1] != self.top_k or highest >= self.experts:
                raise ModelError(
                    f"the engine's routes have {routes.numbers.shape[1]} entries per token and go up to expert "
                    f"{highest}, but layer {self._layer} of this model sends a token to {self.top_k} of {self.experts} "
                    "experts"
                )
        self._pass = Pass(layer_routes, real_N)

    def take_counts(self) -> Tensor:
        """[X + 2], counts since the last call: tokens per expert, replayed choices like the router's, all replayed."""
        counts, self._counts = self._counts, None
        return torch.zeros(self.experts + 2, dtype=torch.float64) if counts is None else counts

    def replace_choice(self, scores: Tensor, router_choice: Any) -> Any:
        """Replace the result of the router's topk of [N, X] `scores` by the engine's choice where that is known."""
        if self._pass is None or router_choice.indices.shape != (len(self._pass.real_N), self.top_k):
            return router_choice
        if scores.shape[-1] != self.experts:
            return router_choice
        routes, real_N = self._pass
        # Tokens count only in a layer's first computation, not when the backward pass recomputes it.
        self._pass = self._pass._replace(real_N=torch.zeros_like(real_N))
        if routes is None:
            self._count(router_choice.indices, real_N)
            return router_choice
        routes_Nk = routes.numbers.long()
        known_Nk = routes.known_N[:, None] & (routes_Nk >= 0)
        chosen_Nk = torch.where(known_Nk, routes_Nk, router_choice.indices)
        counts = self._count(chosen_Nk, real_N)
        is_own_Nk = (chosen_Nk[:, :, None] == router_choice.indices[:, None]).any(-1)
        given_Nk = known_Nk & real_N[:, None]
        counts[-2:] += torch.stack([(is_own_Nk & given_Nk).sum(), given_Nk.sum()])
        return torch.return_types.topk((scores.gather(-1, chosen_Nk), chosen_Nk))

    def _count(self, chosen_Nk: Tensor, real_N: Tensor) -> Tensor:
        # Counts stay on the device, because copying them would synchronise the host once per layer.
        if self._counts is None:
            self._counts = torch.zeros(self.experts + 2, dtype=torch.float64, device=real_N.device)
        return self._counts.scatter_add_(0, chosen_Nk.flatten(), real_N.double().repeat_interleave(self.top_k))

    def _begin(self, module: nn.Module, arguments: object) -> None:
        self._replay_modes.append(_ReplayMode(self))
        self._replay_modes[-1].__enter__()

    def _end(self, module: nn.Module, arguments: object, output: object) -> None:
        self._replay_modes.pop().__exit__(None, None, None)


class _ReplayMode(TorchFunctionMode):
    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self._router.replace_choice(args[0], result) if func in CHOICES else result


def choosers(transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that choose experts, with their names; of nested modules only the outermost."""
    names: list[str] = []
    for name, module in transformer.named_modules():
        chooses = isinstance(getattr(module, "top_k", None), int) and experts_of(module)
        if chooses and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
            yield name, module


def experts_of(chooser: object) -> int:
    """The number of experts of a module or of a model's configuration; 0 without experts."""
    named = (getattr(chooser, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    return next((count for count in named if isinstance(count, int)), 0)
