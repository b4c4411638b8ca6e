"""The `[algorithm]` part of the configuration: one struct for each choice. Equations are in docs/algorithms.md."""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from streamppo.config.base import Count, Fraction, Kind, NonNegative, PositiveFloat, Section
from streamppo.config.correction import (
    Correction,
    Curriculum,
    CustomCorrection,
    Filter,
    NoCorrection,
    Resample,
    SecondMoment,
    Topr,
    Truncate,
    repeated_filters,
)
from streamppo.config.policy_loss import Clip, CustomLoss, PolicyLoss, Reinforce, SequenceClip
from streamppo.config.regularisation import EntropyControl, Exploration, Kl, NoExploration
from streamppo.config.teacher import Teacher


class Discounted(Kind, frozen=True):
    """Estimators that discount rewards over the tokens of a response."""

    gamma: Fraction = 1.0
    """Discount per token."""


class Bootstrapped(Discounted, frozen=True):
    """Estimators that can bootstrap a truncated completion with a value."""

    bootstrap_truncated: bool = False
    """Bootstrap a truncated completion with the critic's value."""


class Gae(Bootstrapped, frozen=True, tag="gae"):
    """Generalized advantage estimation (arXiv:1506.02438): one critic value per token."""

    lam: Fraction = 0.95
    """Lambda of the advantages; 0 is one-step TD, 1 Monte Carlo."""
    adaptive_alpha: NonNegative = 0.0
    """Above 0, lambda is 1 - 1 / (alpha * length) (VAPO, arXiv:2504.05118)."""
    critic_lam: Fraction = 1.0
    """Lambda of the critic's targets."""


class VTrace(Bootstrapped, frozen=True, tag="vtrace"):
    """V-trace (arXiv:1802.01561): the proximal policy's values from tokens of an older policy."""

    lam: Fraction = 1.0
    """Lambda of the trace."""
    clip: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.0)
    """rho_bar, the bound on a TD error's weight, and c_bar, on the trace."""
    trace: Literal["step", "cumulative"] = "cumulative"
    """Clip every factor of the trace, as published ("step"), or their product."""

    def contradictions(self) -> Iterator[str]:
        """A cumulative trace starts at the empty product 1, so c_bar must be at least 1."""
        if self.trace == "cumulative" and self.clip[1] < 1:
            yield f"c_bar, the second of clip ({self.clip[1]}), must be at least 1 with trace = 'cumulative'"


class SequenceLevel(Kind, frozen=True, tag="sequence"):
    """One advantage per response: reward minus the critic's value of the prompt."""


class Grpo(Kind, frozen=True, tag="grpo"):
    """(score - mean) / std of the group (arXiv:2402.03300)."""

    unbiased: bool = True
    """Divide the variance by n - 1, else by n."""


class DrGrpo(Kind, frozen=True, tag="dr_grpo"):
    """score - mean of the group (arXiv:2503.20783)."""

    baseline_shift: float = 0.0
    """Added to the mean; below 0, correct answers weigh more (arXiv:2506.20520)."""


class Rloo(Kind, frozen=True, tag="rloo"):
    """score - mean of the others of the group (arXiv:2402.14740)."""


class MaxRl(Kind, frozen=True, tag="maxrl"):
    """(score - mean) / mean of the group, scores >= 0."""


class Gdpo(Kind, frozen=True, tag="gdpo"):
    """Several rewards, each normalised within its group before they are added (arXiv:2601.05242)."""

    weights: dict[str, float]
    """Weight of each component of the reward."""
    unbiased: bool = True
    """Divide the variances by n - 1, else by n."""

    def contradictions(self) -> Iterator[str]:
        """At least one weight must not be 0."""
        if not any(self.weights.values()):
            yield "weights must name a component of the reward, with a weight that is not 0"


class ReinforcePlusPlus(Discounted, frozen=True, tag="reinforce_plus_plus"):
    """Return-to-go, whitened over the batch (arXiv:2501.03262)."""


class ReinforcePlusPlusBaseline(Kind, frozen=True, tag="reinforce_plus_plus_baseline"):
    """score - mean of the group, whitened over the batch (arXiv:2501.03262)."""


class CustomAdvantage(Kind, frozen=True, tag="function"):
    """A custom advantage, without a critic; tested on a synthetic batch before the first update."""

    function: str
    """`package.module:name` or `path/file.py:name`: `AdvantageInputs` -> [B] or [B, T] advantages."""
    compares_samples: bool = True
    """A batch has all samples of a prompt."""


Advantage: TypeAlias = (
    Gae
    | VTrace
    | SequenceLevel
    | Grpo
    | DrGrpo
    | Rloo
    | MaxRl
    | Gdpo
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | CustomAdvantage
)
CRITIC_BASED = (Gae, VTrace, SequenceLevel)
"""Estimators that need a critic; the others train none."""
PER_TOKEN = (Gae, VTrace, ReinforcePlusPlus, CustomAdvantage)
"""Estimators whose advantages differ within a response."""
GROUP_BASED = (Grpo, DrGrpo, Rloo, MaxRl, Gdpo, ReinforcePlusPlusBaseline)
"""Estimators that need the whole group of a prompt in one batch."""


class Whiten(Section, frozen=True):
    """Advantages get mean 0 and variance 1."""

    over: Literal["auto", "off", "batch", "group"] = "auto"
    """Over the batch, each group, or off; auto: batch with a critic, else off."""
    shift_mean: bool = True
    """Subtract the mean."""
    unbiased: bool = False
    """Divide the variance by n - 1, else by n."""


CRITICS = ("head", "policy", "scratch")
"""Values of `critic.model` that name no folder."""


class Critic(Section, frozen=True):
    """The critic and its loss. A value head is trained in the policy's steps, a second transformer in its own."""

    model: str = "head"
    """A value head on the policy, or a transformer: "policy" (a copy), "scratch", or a path."""
    coefficient: NonNegative = 0.5
    """Weight of the critic's loss where both share a step."""
    clip: NonNegative = 0.2
    """Distance from its first value at which a value's gradient stops; 0 is off."""
    huber: NonNegative = 0.0
    """Above 0, the error from which the loss is linear."""
    lr: NonNegative = 0.0
    """The critic's own learning rate; 0 takes the policy's."""
    epochs: Count = 0
    """A transformer's passes over one batch; 0 takes learner.epochs."""
    minibatches: Count = 0
    """A transformer's optimizer steps in one epoch; 0 takes learner.minibatches."""
    max_grad_norm: NonNegative = 0.0
    """Bound on a transformer's gradient; 0 takes learner.max_grad_norm."""
    warmup_updates: Count = 0
    """Updates in which only the critic learns."""
    pretrain: str = ""
    """Folder of a run whose batches train the critic first; empty is off."""

    @property
    def loss(self) -> Literal["mse", "huber"]:
        """Shape of the loss."""
        return "huber" if self.huber else "mse"

    def contradictions(self) -> Iterator[str]:
        """A value head shares the policy's steps, so it has no schedule of its own."""
        for name in ("epochs", "minibatches", "max_grad_norm"):
            if self.model == "head" and getattr(self, name):
                yield (
                    f"{name} ({getattr(self, name)}) is for a critic with a separate transformer: a value head "
                    f'learns in the policy\'s steps, and further passes would move the policy (model = "policy")'
                )


Aggregation: TypeAlias = Literal[
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "prompt-mean", "constant"
]


class Algorithm(Section, frozen=True):
    """The mathematics of one update."""

    correction: Correction = Truncate()
    """Correction for off-policy data; "off" for none."""
    negative_weight: Fraction = 1.0
    """Weight of tokens with negative advantage, times their correction; 0 drops them."""
    advantage: Advantage = Gae()
    """Estimator of the advantages."""
    zero_variance: Literal["keep", "mask", "resample"] = "keep"
    """Groups of equal scores: train on them, mask them, or sample other prompts."""
    resample: Resample = Resample()
    """The reward component and range of means by which zero_variance = "resample" judges a group."""
    curriculum: Curriculum | None = None
    """Sample rows less often whose last groups had no learning signal; {} for the defaults."""
    filters: tuple[Filter, ...] = ()
    """Filters of responses from the loss, each kind at most once; filtered rewards and tokens still count."""
    whiten: Whiten = Whiten()
    """Scale of the advantages."""
    policy_loss: PolicyLoss = Clip()
    """The policy's loss."""
    proximal: Literal["recompute", "loglinear", "behavior"] = "recompute"
    """Of a forward pass, behavior's, or behavior and current mixed by lag (arXiv:2512.06547)."""
    aggregation: Aggregation = "token-mean"
    """Average of the tokens' losses; "constant" divides by rollout.max_tokens."""
    critic: Critic = Critic()
    """The critic, for the estimators that need one."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    entropy_control: EntropyControl = EntropyControl()
    """Controller of that weight."""
    exploration: Exploration = NoExploration()
    """Special treatment of some tokens, against collapse of the policy's entropy."""
    kl: Kl = Kl()
    """KL from a reference model."""
    teacher: Teacher = Teacher()
    """A teacher model, in addition to the rewards or instead of them."""
    positive_nll: NonNegative = 0.0
    """Weight of correct answers' negative log-likelihood (VAPO, arXiv:2504.05118); 0 is off."""
    target_kl: NonNegative = 0.0
    """Above 0, an update ends when KL(proximal || current) exceeds 1.5 times this."""

    @property
    def has_critic(self) -> bool:
        """True if the advantage needs a critic, which is then trained."""
        return isinstance(self.advantage, CRITIC_BASED)

    @property
    def custom_functions(self) -> dict[str, str]:
        """The user's functions, by the field that names each."""
        choices = {"advantage": self.advantage, "correction": self.correction, "policy_loss": self.policy_loss}
        return {
            field: choice.function
            for field, choice in choices.items()
            if isinstance(choice, CustomAdvantage | CustomCorrection | CustomLoss)
        }

    @property
    def needs_proximal_first(self) -> str | None:
        """The reason why the first step needs the learner's log-probs of the whole batch, or None."""
        if self.has_critic and self.critic.model == "head":
            return "the value head, whose values come from the same pass"
        if isinstance(self.advantage, VTrace):
            return "V-trace, which weighs TD errors by them"
        if isinstance(self.correction, SecondMoment):
            return "the second-moment correction, whose threshold is over the whole batch"
        if isinstance(self.correction, CustomCorrection):
            return "the custom correction, which gets the whole batch"
        if not isinstance(self.exploration, NoExploration):
            return f"exploration {self.exploration.__struct_config__.tag!r}, whose tokens are found in the whole batch"
        if self.teacher.on:
            return "the teacher, whose log-probs are compared with them"
        return "the KL in the reward, which needs them" if self.kl.reward_beta else None

    @property
    def compared_components(self) -> frozenset[str]:
        """Reward components by which samples are compared; each trajectory must have them."""
        weighed = self.advantage.weights if isinstance(self.advantage, Gdpo) else ()
        return frozenset((*weighed, *filter(None, [self.resample.component])))

    @property
    def compares_samples(self) -> str | None:
        """The choice that compares samples, so that a batch needs all samples of a prompt; None if there is none."""
        if self._advantage_compares:
            return f"advantage {self.advantage.__struct_config__.tag!r}"
        return "whiten.over = 'group'" if self.whiten.over == "group" else None

    @property
    def _advantage_compares(self) -> bool:
        custom = isinstance(self.advantage, CustomAdvantage) and self.advantage.compares_samples
        return custom or isinstance(self.advantage, GROUP_BASED)

    def contradictions(self) -> Iterator[str]:
        """Choices that contradict each other."""
        yield from repeated_filters(self.filters)
        yield from self._group_mistakes()
        yield from self._advantage_mistakes()
        yield from self._proximal_mistakes()
        yield from self._sign_mistakes()
        low, high = self.entropy_control.range
        if self.entropy_control.target and not low <= self.entropy <= high:
            yield f"entropy ({self.entropy:g}) must lie in entropy_control.range ({low:g} to {high:g})"

    def _group_mistakes(self) -> Iterator[str]:
        if self.zero_variance != "keep" and not self._advantage_compares:
            yield "zero_variance judges groups: it needs an advantage that compares them"
        if self.zero_variance != "resample" and self.resample != Resample():
            yield f'resample is for zero_variance = "resample", and that is {self.zero_variance!r}'
        if isinstance(self.advantage, Gdpo) and self.zero_variance != "keep":
            yield "zero_variance judges the whole score; with gdpo equal scores have a signal if components differ"
        if self.zero_variance != "keep" and self.teacher.on:
            yield (
                f"zero_variance = {self.zero_variance!r} drops groups of equal scores, in which the teacher has a "
                "signal: leave it at 'keep'"
            )
        if self.curriculum is None:
            return
        if not self._advantage_compares:
            yield "curriculum judges groups: it needs an advantage that compares them"
        if isinstance(self.advantage, Gdpo):
            yield "curriculum judges the whole score; with gdpo equal scores have a signal if components differ"
        if self.teacher.on:
            yield "curriculum skips rows of equal scores, in which the teacher has a signal: leave it out"

    def _advantage_mistakes(self) -> Iterator[str]:
        kind = self.advantage.__struct_config__.tag
        if not self.has_critic and (self.critic.model != "head" or self.critic.warmup_updates or self.critic.pretrain):
            yield (
                f"advantage {kind!r} uses no critic: leave critic.model, critic.warmup_updates and critic.pretrain out"
            )
        if isinstance(self.advantage, Gdpo) and self.kl.reward_beta:
            yield f"advantage {kind!r} ignores a KL in the reward: use kl.loss_beta ({self.kl.reward_beta:g} is lost)"
        if isinstance(self.advantage, MaxRl) and self.kl.reward_beta:
            yield (
                f"advantage {kind!r} needs scores that are not negative, and a KL in the reward can make them so: "
                f"use kl.loss_beta instead of kl.reward_beta ({self.kl.reward_beta:g})"
            )
        if isinstance(self.advantage, MaxRl) and self.teacher.on and self.teacher.signal == "reward":
            yield (
                f"advantage {kind!r} needs scores that are not negative, and a teacher's can be: "
                'use teacher.signal = "advantage"'
            )

    def _sign_mistakes(self) -> Iterator[str]:
        kind = self.advantage.__struct_config__.tag
        by_token = isinstance(self.advantage, PER_TOKEN) or self.teacher.on
        asked = "correction 'topr'" if isinstance(self.correction, Topr) else ""
        asked = asked if self.negative_weight == 1 else f"negative_weight ({self.negative_weight:g})"
        if asked and by_token and isinstance(self.policy_loss, SequenceClip):
            yield (
                f"{asked} depends on the sign of each token's advantage, and policy_loss 'sequence_clip' by the mean: "
                f"with advantage {kind!r}, or with a teacher, the two differ. Choose an advantage of one number for a "
                "response (grpo, rloo, sequence), or another policy_loss"
            )

    def _proximal_mistakes(self) -> Iterator[str]:
        if self.proximal == "loglinear" and self.target_kl:
            yield (
                f"target_kl ({self.target_kl:g}) bounds KL(proximal || current), and proximal = 'loglinear' takes the "
                f"proximal policy from behavior and current by lag: it would bound the lag, not the update's step"
            )
        if self.proximal == "loglinear" and (reason := self.needs_proximal_first):
            yield f"proximal = 'loglinear' saves a pass over the batch that is needed anyway: {reason}"
        if self.proximal == "behavior" and not isinstance(self.correction, NoCorrection):
            yield (
                f"correction {self.correction.__struct_config__.tag!r} is of proximal / behavior, which is 1 with "
                "proximal = 'behavior', whose ratio already corrects for the age: choose correction = { kind = 'off' }"
            )
        if self.proximal == "behavior" and isinstance(self.policy_loss, Reinforce):
            yield (
                "policy_loss 'reinforce' has no ratio, and with proximal = 'behavior' nothing else corrects for the "
                "age of the data: choose policy_loss 'importance_weighted'"
            )
