"""Notes about settings that work but are probably not intended: conflicts, and numbers far outside the usual range."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config import policy_loss as losses
from streamppo.config.algorithm import Algorithm, DrGrpo, Gae, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from streamppo.config.correction import NoCorrection, Reject, Topr, Truncate
from streamppo.config.queue import Segments
from streamppo.config.sections import LOCAL, Config, longest_completion
from streamppo.tasks.task import Task
from streamppo.telemetry import host


def settings(config: Config, task: Task | None) -> Findings:
    """Note conflicting settings. `task` is None unless all its data were read."""
    learner, rollout = config.learner, config.rollout
    yield from _correction(config)
    yield from _queue(config)
    yield from _loss(config)
    yield from _excluded_groups(config)
    yield from _without_effect(config)
    for name, updates in (("learner", learner), ("algorithm.critic", config.algorithm.critic)):
        if updates.warmup_updates >= config.updates:
            yield _note(f"{name}.warmup_updates ({updates.warmup_updates}) is the whole run ({config.updates} updates)")
    if rollout.in_flight < rollout.slots:
        yield _note(
            f"rollout.in_flight ({rollout.in_flight}) is below rollout.slots ({rollout.slots}): the other slots of "
            "an engine stay empty"
        )
    if not learner.exact:
        yield _note("learner.exact is false: replayed updates have weights near the recorded ones, not the same")
    yield from _cores(config)
    prompts = config.queue.batch_size // config.queue.samples_per_prompt
    if task is not None and config.queue.segments is None and 0 < len(task.training) < prompts:
        yield _note(
            f"a batch has {prompts} prompts (batch_size / samples_per_prompt), and the data have {len(task.training)}: "
            f"each is {prompts / len(task.training):.3g} times in every batch; more data, or a smaller batch"
        )
    held_out = None if task is None else len(task.held_out(None))
    if held_out is not None and held_out < config.evaluation.prompts:
        yield _note(f"evaluation.prompts ({config.evaluation.prompts}) is more than the {held_out} held-out prompts")


def _correction(config: Config) -> Findings:
    algorithm, max_lag = config.algorithm, config.queue.bound
    steps = config.learner.steps
    correction, kind = algorithm.correction, algorithm.correction.__struct_config__.tag
    is_old = algorithm.proximal != "behavior" and max_lag > 0
    if is_old and isinstance(correction, NoCorrection) and steps > 1:
        yield _note(
            f'algorithm.correction is "off" with max_lag ({max_lag}) and {steps} steps on each batch: old tokens '
            "count as new ones, and such runs learn less"
        )
    if is_old and isinstance(correction, NoCorrection | Reject | Topr) and algorithm.kl.loss_beta:
        where = ", where advantages are not negative," if isinstance(correction, Topr) else ""
        yield _note(
            f'algorithm.kl.loss_beta ({algorithm.kl.loss_beta:g}) with correction "{kind}" and max_lag ({max_lag}): '
            f"the KL to the reference is then{where} that of the behavior policy, not the learner's"
        )
    if isinstance(correction, Truncate) and correction.cap < 1:
        yield _note(
            f"algorithm.correction.cap ({correction.cap:g}) is below 1: fresh tokens lose weight too, as by "
            "a smaller learning rate"
        )


def _queue(config: Config) -> Findings:
    if config.queue.admission == "mean":
        yield _note(
            f"queue.admission is 'mean': queue.max_lag ({config.queue.bound}) bounds the mean lag of completions, "
            "not that of a token: a slow completion is trained on at any lag"
        )
    segments, longest = config.queue.segments, longest_completion(config)
    if segments is not None and 0 < segments.max_tokens < longest:
        yield _note(
            f"queue.segments.max_tokens ({segments.max_tokens}) cuts every longer completion, even one that ends in "
            "time: its tokens learn from the critic instead of the reward, and the policy waits until the critic "
            "explains outcomes; segments = {} cuts only completions that would grow too old"
        )


def _loss(config: Config) -> Findings:
    algorithm, loss = config.algorithm, config.algorithm.policy_loss
    kind, steps = loss.__struct_config__.tag, config.learner.steps
    unaffected = losses.Reinforce | losses.ImportanceWeighted | losses.CustomLoss | losses.Cispo
    plain = isinstance(loss, unaffected) or loss == losses.Clip()
    if steps == 1 and algorithm.proximal == "recompute" and not plain:
        yield _note(
            f"algorithm.policy_loss {kind!r} depends on current / proximal, which is 1 if an update is one step: "
            "raise learner.epochs or learner.minibatches, or take current / behavior by proximal = 'behavior'"
        )
    if steps > 1 and isinstance(loss, losses.Reinforce):
        yield _note(
            f"algorithm.policy_loss 'reinforce' has no ratio, and {steps} steps on each batch: after the first step "
            "samples count as if the updated policy had drawn them ('importance_weighted' corrects for that)"
        )
    of_response = isinstance(loss, losses.Gspo | losses.Gmpo | losses.SequenceClip)
    if of_response and algorithm.aggregation != "sequence-mean-token-mean":
        yield _note(
            f"algorithm.policy_loss {kind!r} is one loss for a response; aggregation {algorithm.aggregation!r} counts "
            "it once for each token, 'sequence-mean-token-mean' only once"
        )


def _excluded_groups(config: Config) -> Findings:
    algorithm = config.algorithm
    for signal in _signals_of_equal_scores(algorithm):
        if algorithm.zero_variance != "keep":
            yield _note(
                f"algorithm.zero_variance is {algorithm.zero_variance!r}: groups of equal scores are not trained on, "
                f"though {signal}"
            )
        if algorithm.curriculum is not None:
            yield _note(f"algorithm.curriculum skips rows of equal scores, though {signal}")


def _signals_of_equal_scores(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.kl.reward_beta:
        yield f"the KL in the reward (reward_beta {algorithm.kl.reward_beta:g}) gives their samples different rewards"
    if isinstance(algorithm.advantage, DrGrpo) and algorithm.advantage.baseline_shift:
        yield f"baseline_shift ({algorithm.advantage.baseline_shift:g}) gives their samples an advantage"
    if algorithm.positive_nll:
        yield f"positive_nll ({algorithm.positive_nll:g}) trains on their right answers"


def _without_effect(config: Config) -> Findings:
    algorithm, learner, segments = config.algorithm, config.learner, config.queue.segments or Segments()
    kl, whiten, control = algorithm.kl, algorithm.whiten, algorithm.entropy_control
    advantage, kind = algorithm.advantage, algorithm.advantage.__struct_config__.tag
    gae = advantage if isinstance(advantage, Gae) else Gae()
    one_step = learner.steps == 1 and algorithm.proximal == "recompute"
    whitens = isinstance(advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline)
    is_off = whiten.over == "off" or (whiten.over == "auto" and not algorithm.has_critic)
    no_critic, whitens_itself = f"advantage {kind!r} has no critic", f"advantage {kind!r} whitens over the batch itself"
    steered, of_loss = ("step", "range"), ("loss_estimator", "straight_through")
    for name, section, fields, is_idle, reason in (
        (
            "algorithm.critic.",
            algorithm.critic,
            ("lr", "coefficient", "clip", "huber"),
            not algorithm.has_critic,
            no_critic,
        ),
        ("algorithm.", algorithm, ("target_kl",), one_step, "an update is one step from the proximal policy"),
        (
            "algorithm.whiten.",
            whiten,
            ("shift_mean", "unbiased"),
            is_off and not whitens,
            "advantages are not whitened",
        ),
        ("algorithm.whiten.", whiten, ("over", "shift_mean", "unbiased"), is_off and whitens, whitens_itself),
        ("algorithm.entropy_control.", control, steered, not control.target, "entropy_control.target is 0"),
        ("algorithm.kl.", kl, ("horizon",), not kl.target, "kl.target is 0"),
        ("algorithm.kl.", kl, ("reward_estimator",), not kl.reward_beta, "kl.reward_beta is 0"),
        ("algorithm.kl.", kl, of_loss, not kl.loss_beta, "kl.loss_beta is 0"),
        ("algorithm.kl.", kl, ("allow_both",), not (kl.reward_beta and kl.loss_beta), "one of both weights is 0"),
        ("algorithm.kl.", kl, ("offload",), not kl.on, "kl.reward_beta and kl.loss_beta are 0"),
        ("algorithm.advantage.", gae, ("lam",), gae.adaptive_alpha > 0, "adaptive_alpha computes it"),
        ("learner.", learner, ("final_lr_share",), learner.decay == "constant", "learner.decay is 'constant'"),
        ("queue.segments.", segments, ("explained",), not segments.max_tokens, "queue.segments.max_tokens is 0"),
    ):
        for field in fields if is_idle else ():
            if (value := getattr(section, field)) != getattr(type(section)(), field):
                yield _note(f"{name}{field} ({value}) has no effect: {reason}")


def _cores(config: Config) -> Findings:
    """Engines' threads count half if the learner has several threads."""
    learners = config.learner.ranks * config.learner.thread_count
    engines = config.rollout.actors * config.rollout.threads
    cores, threads = host.cores(), learners + engines
    busy = learners + (engines if config.learner.thread_count == 1 else engines // 2)
    if config.cluster.address == LOCAL and busy > cores:
        yield _note(f"learner ranks and rollout actors have {threads} threads, but this machine has {cores} cores")


def _note(text: str) -> Finding:
    return Finding("settings", "note", text)


class Range(NamedTuple):
    """A setting, the bounds beyond which it is noted, and the usual range in words. `value` or `name` finds it."""

    name: str
    low: float
    high: float
    usual: str
    value: Callable[[Config], float | None] | None = None


def _upper_clip(config: Config) -> float | None:
    loss = config.algorithm.policy_loss
    return loss.range[1] if isinstance(loss, losses.Clip) else None


ANY = float("inf")
RATES = "from 1e-6 for weights of a billion to 1e-3 for those of 0.1 million"
RANGES = (
    Range("learner.lr", 1e-9, 1e-2, RATES),
    Range("algorithm.critic.lr", 1e-9, 3e-2, "from 1e-6 to 3e-3", lambda config: config.algorithm.critic.lr or None),
    Range("learner.max_grad_norm", 1e-3, ANY, "from 0.1 to 1"),
    Range("learner.weight_decay", 0.0, 1.0, "from 0 to 0.1"),
    Range("learner.epochs", 1, 20, "from 1 to 4"),
    Range("rollout.temperature", 0.2, 2.0, "from 0.6 to 1.2"),
    Range("rollout.top_p", 0.3, 1.0, "from 0.9 to 1"),
    Range("queue.max_lag", 0, 64, "from 0 to 16", lambda config: config.queue.bound),
    Range("algorithm.entropy", -0.1, 0.3, "from 0 to 0.01"),
    Range("algorithm.kl.loss_beta", 0.0, 1.0, "from 0.001 to 0.1"),
    Range("algorithm.kl.reward_beta", 0.0, 1.0, "from 0.001 to 0.1"),
    Range("algorithm.critic.coefficient", 0.0, 10.0, "from 0.1 to 1"),
    Range("algorithm.positive_nll", 0.0, 2.0, "about 0.1"),
    Range("algorithm.target_kl", 0.0, 1.0, "from 0.01 to 0.1"),
    Range("algorithm.advantage.lam", 0.5, 1.0, "from 0.9 to 1"),
    Range("algorithm.advantage.gamma", 0.9, 1.0, "from 0.99 to 1"),
    Range("algorithm.policy_loss.range", 0.001, 2.0, "from 0.1 to 0.4", _upper_clip),
    Range("algorithm.correction.cap", 0.0, 50.0, "from 1 to 10"),
)


def ranges(config: Config) -> Findings:
    """Note each setting outside its range."""
    for setting in RANGES:
        path = setting.name.split(".")
        by_name = reduce(lambda section, field: getattr(section, field, None), path, config)
        value = setting.value(config) if setting.value else by_name
        if isinstance(value, int | float) and not setting.low <= value <= setting.high:
            side = "above" if value > setting.high else "below"
            yield _note(f"{setting.name} ({value:g}) is far {side} the usual range: {setting.usual}")
