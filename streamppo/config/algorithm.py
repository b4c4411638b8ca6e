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
    repeated,
)
from streamppo.config.policy_loss import Clip, CustomLoss, PolicyLoss, Reinforce, SequenceClip
from streamppo.config.regularisation import EntropyControl, Exploration, Kl, NoExploration
from streamppo.config.teacher import Teacher


class Discounted(Kind, frozen=True):
    """Estimators that discount rewards over the tokens of a response."""

    gamma: Fraction = 1.0
    """Discount per token."""


class Bootstrapped(Discounted, frozen=True):
    """Estimators that can use the critic's value at the end of a truncated completion."""

    bootstrap_truncated: bool = False
    """Add the critic's value at the end of a truncated completion to its return."""


class Gae(Bootstrapped, frozen=True, tag="gae"):
    """Generalized advantage estimation (arXiv:1506.02438): one critic value per token."""

    lam: Fraction = 0.95
    """Lambda of the advantages: 0 is one-step TD, 1 is Monte Carlo."""
    adaptive_alpha: NonNegative = 0.0
    """Above 0, lam is 1 - 1 / (alpha * length) (VAPO, arXiv:2504.05118)."""
    critic_lam: Fraction = 1.0
    """Lambda of the returns, the critic's targets."""


class VTrace(Bootstrapped, frozen=True, tag="vtrace"):
    """V-trace (arXiv:1802.01561): estimates the proximal policy's values from tokens that an older policy sampled."""

    lam: Fraction = 1.0
    """A TD error's weight decays by gamma * lam per token."""
    clip: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.0)
    """[rho_bar, c_bar]: the largest weight of a TD error, and the bound on the trace."""
    trace: Literal["step", "cumulative"] = "cumulative"
    """Clip each factor of the trace at c_bar ("step", as published), or their product ("cumulative")."""

    def contradictions(self) -> Iterator[str]:
        if self.trace == "cumulative" and self.clip[1] < 1:
            yield f"c_bar, the second of clip ({self.clip[1]}), must be at least 1 with trace = 'cumulative'"


class SequenceLevel(Kind, frozen=True, tag="sequence"):
    """One advantage per response: reward - the critic's value of the prompt."""


class Grpo(Kind, frozen=True, tag="grpo"):
    """(score - the group's mean) / the group's standard deviation (arXiv:2402.03300)."""

    unbiased: bool = True
    """Divide the variance by n - 1 (true) or n (false)."""


class DrGrpo(Kind, frozen=True, tag="dr_grpo"):
    """score - the group's mean (arXiv:2503.20783)."""

    baseline_shift: float = 0.0
    """Added to the mean; below 0, correct answers weigh more (arXiv:2506.20520)."""


class Rloo(Kind, frozen=True, tag="rloo"):
    """score - the mean of the group's other scores (arXiv:2402.14740)."""


class MaxRl(Kind, frozen=True, tag="maxrl"):
    """(score - the group's mean) / the group's mean, for scores of at least 0."""


class Gdpo(Kind, frozen=True, tag="gdpo"):
    """Several rewards, each normalised within its group before they are added (arXiv:2601.05242)."""

    weights: dict[str, float]
    """Weight of each component of the reward."""
    unbiased: bool = True
    """Divide the variances by n - 1 (true) or n (false)."""

    def contradictions(self) -> Iterator[str]:
        if not any(self.weights.values()):
            yield "weights must name a component of the reward, with a weight that is not 0"


class ReinforcePlusPlus(Discounted, frozen=True, tag="reinforce_plus_plus"):
    """Each token's discounted return, whitened over the batch (arXiv:2501.03262)."""


class ReinforcePlusPlusBaseline(Kind, frozen=True, tag="reinforce_plus_plus_baseline"):
    """score - the group's mean, whitened over the batch (arXiv:2501.03262)."""


class CustomAdvantage(Kind, frozen=True, tag="function"):
    """The user's function, without a critic. A run tests the function on a synthetic batch before its first update."""

    function: str
    """A function from `AdvantageInputs` to [B] or [B, T] advantages."""
    compares_samples: bool = True
    """True if the function compares the samples of a prompt, which are then all in one batch."""


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
"""Estimators that need a critic. A run with any other estimator trains no critic."""
PER_TOKEN = (Gae, VTrace, ReinforcePlusPlus, CustomAdvantage)
"""Estimators that give each token of a response its own advantage."""
GROUP_BASED = (Grpo, DrGrpo, Rloo, MaxRl, Gdpo, ReinforcePlusPlusBaseline)
"""Estimators that need all samples of a prompt in one batch."""


class Whiten(Section, frozen=True):
    """Scales advantages to mean 0 and variance 1."""

    over: Literal["auto", "off", "batch", "group"] = "auto"
    """Whiten over the batch or over each group; "auto" is "batch" with a critic and "off" without."""
    shift_mean: bool = True
    """True subtracts the mean."""
    unbiased: bool = False
    """Divide the variance by n - 1 (true) or n (false)."""


CRITICS = ("head", "policy", "scratch")
"""Values of `critic.model` that name a kind of critic. All other values are paths."""


class Critic(Section, frozen=True):
    """The critic and its loss. Only a critic with its own transformer has its own optimizer steps."""

    model: str = "head"
    """A value head, or a second transformer: the policy's copy ("policy"), random ("scratch"), or a path."""
    coefficient: NonNegative = 0.5
    """Factor on the critic's loss."""
    clip: NonNegative = 0.2
    """The loss does not reward moving a value further than this in an update (PPO's clip); 0 is off."""
    huber: NonNegative = 0.0
    """Above 0, the loss is linear for errors above this (Huber)."""
    lr: NonNegative = 0.0
    """The critic's learning rate; 0 is learner.lr."""
    epochs: Count = 0
    """Passes of a second transformer over one batch; 0 is learner.epochs."""
    minibatches: Count = 0
    """A second transformer's optimizer steps in one epoch; 0 is learner.minibatches."""
    max_grad_norm: NonNegative = 0.0
    """Largest gradient norm of a second transformer; 0 is learner.max_grad_norm."""
    warmup_updates: Count = 0
    """Number of first updates that train only the critic."""
    pretrain: str = ""
    """Folder of a run with the same tokenizer. Before the first update the critic is trained on the run's archive."""

    @property
    def loss(self) -> Literal["mse", "huber"]:
        return "huber" if self.huber else "mse"

    def contradictions(self) -> Iterator[str]:
        for name in ("epochs", "minibatches", "max_grad_norm"):
            if self.model == "head" and getattr(self, name):
                yield (
                    f"{name} ({getattr(self, name)}) needs a second transformer (critic.model): a value head "
                    "is trained in the policy's steps, and further passes would also train the policy"
                )


Aggregation: TypeAlias = Literal[
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "prompt-mean", "constant"
]


class Algorithm(Section, frozen=True):
    """The mathematics of one update."""

    correction: Correction = Truncate()
    """Correction for off-policy data; "off" for none."""
    negative_weight: Fraction = 1.0
    """Factor on the weight of tokens with a negative advantage."""
    advantage: Advantage = Gae()
    """Estimator of the advantages."""
    zero_variance: Literal["keep", "mask", "resample"] = "keep"
    """Keep groups of equal scores, mask them, or replace them by samples of other prompts."""
    resample: Resample = Resample()
    """Which groups zero_variance = "resample" replaces."""
    curriculum: Curriculum | None = None
    """Samples a row less often if its last groups had no learning signal; `{}` chooses the defaults."""
    filters: tuple[Filter, ...] = ()
    """Filters that drop responses from the loss. Rewards and tokens of dropped responses still count in averages."""
    whiten: Whiten = Whiten()
    """Scale of the advantages."""
    policy_loss: PolicyLoss = Clip()
    """The policy's loss."""
    proximal: Literal["recompute", "loglinear", "behavior"] = "recompute"
    """Proximal log-probs: of a forward pass, mixed by lag ("loglinear", arXiv:2512.06547), or of sampling."""
    aggregation: Aggregation = "token-mean"
    """The average of the tokens' losses; "constant" divides a response's sum by rollout.max_tokens."""
    critic: Critic = Critic()
    """The critic of "gae", "vtrace" and "sequence"."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    entropy_control: EntropyControl = EntropyControl()
    """Controls the weight of the entropy bonus."""
    exploration: Exploration = NoExploration()
    """Treats some tokens differently, so that the policy's entropy does not collapse."""
    kl: Kl = Kl()
    """KL penalty to a reference model."""
    teacher: Teacher = Teacher()
    """A teacher model whose signal is added to the rewards or replaces them."""
    positive_nll: NonNegative = 0.0
    """Weight of the negative log-likelihood of correct answers (VAPO, arXiv:2504.05118)."""
    target_kl: NonNegative = 0.0
    """Above 0, an update ends if KL(proximal || current) exceeds 1.5 times this."""

    @property
    def has_critic(self) -> bool:
        """True if the advantage needs a critic."""
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
        """A phrase for what needs log-probs of the whole batch before the first optimizer step; None for nothing."""
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
        """The reward components that every trajectory must have, because samples of a group are compared by them."""
        weighed = self.advantage.weights if isinstance(self.advantage, Gdpo) else ()
        return frozenset((*weighed, *filter(None, [self.resample.component])))

    @property
    def compares_samples(self) -> str | None:
        """The setting that needs all samples of a prompt in one batch; None if no setting needs them."""
        if self._advantage_compares:
            return f"advantage {self.advantage.__struct_config__.tag!r}"
        return "whiten.over = 'group'" if self.whiten.over == "group" else None

    @property
    def _advantage_compares(self) -> bool:
        custom = isinstance(self.advantage, CustomAdvantage) and self.advantage.compares_samples
        return custom or isinstance(self.advantage, GROUP_BASED)

    def contradictions(self) -> Iterator[str]:
        yield from repeated(self.filters, "filters")
        yield from self._group_mistakes()
        yield from self._advantage_mistakes()
        yield from self._proximal_mistakes()
        yield from self._sign_mistakes()
        low, high = self.entropy_control.range
        if self.entropy_control.target and not low <= self.entropy <= high:
            yield f"entropy ({self.entropy:g}) must lie in entropy_control.range ({low:g} to {high:g})"

    def _group_mistakes(self) -> Iterator[str]:
        if self.zero_variance != "keep" and not self._advantage_compares:
            yield "zero_variance finds groups of equal scores: it needs an advantage that compares samples of a prompt"
        if self.zero_variance != "resample" and self.resample != Resample():
            yield f'resample is for zero_variance = "resample", and zero_variance is {self.zero_variance!r}'
        if isinstance(self.advantage, Gdpo) and self.zero_variance != "keep":
            yield "zero_variance compares scores, and with gdpo equal scores have a signal if components differ"
        if self.zero_variance != "keep" and self.teacher.on:
            yield (
                f"zero_variance = {self.zero_variance!r} drops groups of equal scores, in which the teacher has a "
                "signal: leave it at 'keep'"
            )
        if self.curriculum is None:
            return
        if not self._advantage_compares:
            yield "curriculum finds groups without a signal: it needs an advantage that compares samples of a prompt"
        if isinstance(self.advantage, Gdpo):
            yield "curriculum compares scores, and with gdpo equal scores have a signal if components differ"
        if self.teacher.on:
            yield "curriculum skips rows of equal scores, in which the teacher has a signal: leave it out"

    def _advantage_mistakes(self) -> Iterator[str]:
        kind = self.advantage.__struct_config__.tag
        if not self.has_critic and (self.critic.model != "head" or self.critic.warmup_updates or self.critic.pretrain):
            yield (
                f"advantage {kind!r} uses no critic: leave critic.model, critic.warmup_updates and critic.pretrain out"
            )
        if isinstance(self.advantage, Gdpo) and self.kl.reward_beta:
            yield f"advantage {kind!r} ignores kl.reward_beta ({self.kl.reward_beta:g}): use kl.loss_beta"
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
        if isinstance(self.advantage, Gdpo) and self.teacher.on and self.teacher.signal == "reward":
            yield (
                f"advantage {kind!r} compares components of the reward, which a teacher's signal is not: "
                'use teacher.signal = "advantage"'
            )

    def _sign_mistakes(self) -> Iterator[str]:
        kind = self.advantage.__struct_config__.tag
        by_token = isinstance(self.advantage, PER_TOKEN) or self.teacher.on
        setting = "correction 'topr'" if isinstance(self.correction, Topr) else ""
        setting = setting if self.negative_weight == 1 else f"negative_weight ({self.negative_weight:g})"
        if setting and by_token and isinstance(self.policy_loss, SequenceClip):
            yield (
                f"{setting} depends on the sign of each token's advantage, and policy_loss 'sequence_clip' on the "
                f"mean: with advantage {kind!r}, or with a teacher, the two differ. Choose an advantage of one number "
                "for a response (grpo, rloo, sequence), or another policy_loss"
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
                f"correction {self.correction.__struct_config__.tag!r} weighs by proximal / behavior, which is 1 with "
                "proximal = 'behavior'. The loss's ratio already corrects for lag: choose correction = { kind = 'off' }"
            )
        if self.proximal == "behavior" and isinstance(self.policy_loss, Reinforce):
            yield (
                "policy_loss 'reinforce' has no ratio, and with proximal = 'behavior' nothing else corrects for the "
                "age of the data: choose policy_loss 'importance_weighted'"
            )
