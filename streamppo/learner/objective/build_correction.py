"""Builds the configured correction and filters. B trajectories, T completion tokens (padded)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor

from streamppo.algorithms import corrections, custom_functions, rejections
from streamppo.algorithms.corrections import Correction
from streamppo.config import correction as choices
from streamppo.tasks import plugins

Correct: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Correction]
"""(proximal_logprobs_BT, behavior_logprobs_BT, advantages_BT, lag_BT, mask_BT, trained_BT) -> `Correction`."""
Filter: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(truncated_B, logprobs_BT, behavior_logprobs_BT, advantages_BT, mask_BT) -> [B, T], tokens left out of the loss."""


def rejection_metric(name: str) -> str:
    """The name of a rejection rule's metric."""
    return f"rejected_{name}"


def filter_metric(name: str) -> str:
    """The name of a filter's metric."""
    return f"filtered_{name}"


TRUNCATED = filter_metric(str(choices.FilterTruncated.__struct_config__.tag))
"""The metric of the filter of truncated completions, the only rule that needs no log-probs."""


def metrics(choice: choices.Correction, chosen: Sequence[choices.Filter]) -> list[str]:
    """The names of the metrics of all rules that leave tokens out of the policy's loss."""
    beside = choice.reject if isinstance(choice, choices.Reject | choices.Weighted) else ()
    itself = isinstance(choice, choices.Mask | choices.SecondMoment | choices.CustomCorrection)
    dropping = [rejection_metric(str(rule.__struct_config__.tag)) for rule in (choice,) * itself + beside]
    return dropping + [filter_metric(str(rule.__struct_config__.tag)) for rule in chosen]


def build(choice: choices.Correction) -> Correct:
    """Build the correction of `choice`."""
    weights = corrections.importance_weights
    match choice:
        case choices.NoCorrection():
            return _with_rejections(partial(weights, level="token", mode="off"))
        case choices.Reject(reject=rules):
            return _with_rejections(partial(weights, level="token", mode="off"), rules)
        case choices.Truncate(level=level, cap=cap, floor=floor, reject=rules):
            return _with_rejections(partial(weights, level=level, mode="truncate", cap=cap, floor=floor), rules)
        case choices.Mask(level=level, band=(lo, hi), reject=rules):
            return _with_rejections(partial(weights, level=level, mode="mask", lo=lo, hi=hi), rules)
        case choices.Topr():
            return lambda proximal_BT, behavior_BT, advantages_BT, _lag, mask_BT, _trained: corrections.topr(
                proximal_BT, behavior_BT, advantages_BT, mask_BT
            )
        case choices.SecondMoment(threshold=threshold):
            # The mask counts only tokens in the loss: other tokens with small log-ratios would loosen the bound.
            mask = corrections.second_moment_mask
            return lambda proximal_BT, behavior_BT, _advantages, _lag, _mask, trained_BT: mask(
                proximal_BT, behavior_BT, trained_BT, threshold=threshold
            )
        case choices.CustomCorrection(function=name):
            field, attempt = "algorithm.correction.function", custom_functions.try_custom_correction
            custom = partial(custom_functions.custom_correction, function=plugins.load_and_try(name, field, attempt))
            return lambda proximal_BT, behavior_BT, _advantages, *rest: custom(proximal_BT, behavior_BT, *rest)


def _with_rejections(
    weigh: Callable[[Tensor, Tensor, Tensor], Correction], rules: Sequence[choices.Rejection] = ()
) -> Correct:
    """Add rejection `rules` to a correction. A response's ratio is over all its sampled tokens, also beyond max_lag."""
    rules_N = [_rule(rule) for rule in rules]

    def correct(
        proximal_BT: Tensor, behavior_BT: Tensor, _advantages: Tensor, _lag: Tensor, mask_BT: Tensor, _trained: Tensor
    ) -> Correction:
        columns = proximal_BT, behavior_BT, mask_BT
        return rejections.reject(weigh(*columns), *columns, rules_N)

    return correct


def _rule(choice: choices.Rejection) -> rejections.RejectionRule:
    rule = partial(rejections.RejectionRule, str(choice.__struct_config__.tag))
    match choice:
        case choices.RejectToken(band=(lo, hi)):
            return rule(partial(rejections.ratio_in_band, level="token", lo=lo, hi=hi))
        case choices.RejectSequence(band=(lo, hi)):
            return rule(partial(rejections.ratio_in_band, level="sequence", lo=lo, hi=hi))
        case choices.RejectGeometric(band=(lo, hi)):
            return rule(partial(rejections.ratio_in_band, level="geometric", lo=lo, hi=hi))
        case choices.RejectOutlier(band=(lo, hi)):
            return rule(partial(rejections.outlier_free, lo=lo, hi=hi))
        case choices.RejectK3(at_most=at_most):
            return rule(partial(rejections.mean_k3, at_most=at_most))


def filters_of(choices: Sequence[choices.Filter]) -> dict[str, Filter]:
    """Build the filters; the keys are their kinds."""
    return {str(choice.__struct_config__.tag): _filter(choice) for choice in choices}


def _filter(choice: choices.Filter) -> Filter:
    match choice:
        case choices.FilterTruncated():
            return lambda truncated_B, _logprobs, _behavior, _advantages, mask_BT: rejections.truncated_tokens(
                truncated_B, mask_BT
            )
        case choices.FilterOffPolicyNegative(delta=delta):
            negative = partial(rejections.off_policy_negative, delta=delta)
            return lambda _truncated, *columns: negative(*columns)
