"""Signs of bad learning: each rule is a small function of a run's numbers. Pure: no disk, no clock.

A rule gets a run's `Evidence` and returns the numbers that made it fire, or None. No rule fires on a healthy run of the
default configuration. None of these is a fault: low entropy of a policy that still improves; low entropy, equal groups
or no variance to explain in a nearly solved task; a single evaluation below the previous one.
"""

from collections.abc import Callable
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

from streamppo.config.sections import describe_limits
from streamppo.telemetry import attempts, context_reuse, progress
from streamppo.telemetry.evidence import SOLVED, WINDOW, Evidence

EARLY = 3
"""Number of updates before the first check of early rules."""
CLIPPED, UNMOVED = 0.3, 1e-3
SPIKE, SPIKE_KL, SPIKES = 10.0, 0.5, 4
DIVERGED, UNEXPLAINED = 4.0, -0.1
COLLAPSED, DRIFTED = 0.1, 2.0
FEW_EFFECTIVE, TOO_OLD, MISMATCH = 0.3, 0.05, 0.05
WAITS, WAITS_CPU, IDLE, IDLE_CPU = 0.8, 0.95, 0.5, 0.75
LEAST_AHEAD = 2
"""Engines sample during updates only if their weights may be at least this number of versions old."""
FALLEN = 0.1
"""The reward has fallen if its mean is lower by more than this share of reward.correct_at."""
TRUNCATED, EQUAL, FAILED, EMPTY = 0.2, 0.8, 0.05, 0.5
NEARLY_ALL = 0.9
CUT, EXPLAINED = 0.3, 0.1
REUSED = 0.5


class SignRule(NamedTuple):
    """A rule. `fires` is its condition in words. An `early` rule is also checked after the first `EARLY` updates."""

    name: str
    fires: str
    advice: str
    check: Callable[[Evidence], str | None]
    early: bool = False


# --- the policy ----------------------------------------------------------------------------------------------


def _unmoved(run: Evidence) -> str | None:
    steps, low, high = (run.mean(name) for name in ("steps", "ratio_p01", "ratio_p99"))
    if steps is None or low is None or high is None or steps <= 1:
        return None
    clipped = sum(run.mean(name) or 0.0 for name in ("clip_fraction_low", "clip_fraction_high"))
    if clipped or high - low > UNMOVED:
        return None
    return f"no token clipped, 98% of the ratios between {low:.4f} and {high:.4f} after {steps:g} steps an update"


def _clipped(run: Evidence) -> str | None:
    share = sum(run.mean(name) or 0.0 for name in ("clip_fraction_low", "clip_fraction_high"))
    return f"{share:.0%} of the trained tokens are clipped" if share > CLIPPED else None


def _kl_spikes(run: Evidence) -> str | None:
    for name in ("proximal_kl", "behavior_kl", "reference_kl"):
        values = run.series(name)
        high = [value for value in values if value > max(SPIKE_KL, SPIKE * median(values))]
        # A KL is a heavy-tailed mean, so one large value can come from one token whose probability rose.
        if len(high) >= SPIKES or (high and _reward_falls_after_largest(run, name)):
            return f"{name} was {max(values):.3g} nats, {median(values):.3g} in the median"
    return None


def _entropy_collapses(run: Evidence) -> str | None:
    first, entropy = _first(run, "entropy"), run.mean("entropy")
    if first is None or entropy is None or entropy > COLLAPSED * first * run.remaining_errors or run.rises:
        return None
    return f"entropy {entropy:.3g} nats a token, {first:.3g} in the first {WINDOW} updates"


def _gradient_spikes(run: Evidence) -> str | None:
    bad, norms = sum(run.series("bad_steps")), run.series("grad_norm")
    if bad:
        return f"{bad:g} optimizer steps were left out: their gradient was not finite"
    high = [norm for norm in norms if norm > SPIKE * median(norms) > 0]
    # A gradient is a heavy-tailed sum, and is clipped, so a single large norm is not a fault. If nearly all groups
    # are correct, most gradients are almost 0, and the gradients of the rare wrong answers are large in comparison.
    are_frequent = len(high) >= SPIKES and run.correct_share < SOLVED
    if are_frequent or (high and _reward_falls_after_largest(run, "grad_norm")):
        return f"grad_norm was {max(norms):.3g}, {median(norms):.3g} in the median"
    return None


def _reward_falls_after_largest(run: Evidence, name: str) -> bool:
    """Return whether the reward is lower after the largest value of a metric than before it."""
    pairs = [(update[name], update["reward"]) for update in run.recent if {name, "reward"} <= {*update}]
    place = max(range(len(pairs)), key=lambda number: pairs[number][0], default=0)
    before, behind = ([reward for _, reward in part] for part in (pairs[:place], pairs[place + 1 :]))
    return bool(before and behind) and fmean(before) - fmean(behind) > FALLEN * run.config.reward.correct_at


# --- the critic ----------------------------------------------------------------------------------------------


def _value_loss_diverges(run: Evidence) -> str | None:
    means = [window["value_loss"] for window in run.windows if "value_loss" in window]
    if len(means) < 3 or not 0 < DIVERGED * min(means[:-1]) < means[-1] or means[-1] < means[-2] or run.is_solved:
        return None
    return f"value loss {means[-1]:.3g}, and {min(means[:-1]):.3g} at its lowest"


def _explains_nothing(run: Evidence) -> str | None:
    explained = [window["explained_variance"] for window in run.windows[-2:] if "explained_variance" in window]
    # The rewards of a single window may be nearly equal, and then they have no variance to explain.
    if len(explained) < 2 or max(explained) > UNEXPLAINED or not run.mean("value_loss") or run.is_solved:
        return None
    return f"explained variance {explained[-1]:.2f}: the critic is worse than a constant"


def _cuts_without_critic(run: Evidence) -> str | None:
    # An update without cuts has no metric `segments_cut`, and counts as 0.
    share, explained = sum(run.series("segments_cut")) / max(len(run.recent), 1), run.mean("explained_variance")
    if explained is None or share <= CUT or explained >= EXPLAINED or run.is_solved:
        return None
    return f"{share:.0%} of the segments end in a cut, and the critic explains nothing there ({explained:.2f})"


# --- the data ------------------------------------------------------------------------------------------------


def _worse_than_at_start(run: Evidence) -> str | None:
    scored = run.scored
    if len(scored) < 2 or not progress.is_below(scored[-1], scored[0]):
        return None
    best = max(scored, key=lambda evaluation: evaluation.accuracy)
    return (
        f"held-out accuracy {scored[-1].accuracy:.3f}, and {scored[0].accuracy:.3f} at first; the best is "
        f"{best.accuracy:.3f}, of version {best.version}"
    )


def _held_out_falls(run: Evidence) -> str | None:
    scored = run.scored
    if not scored or not run.windows:
        return None
    best = max(scored, key=attrgetter("accuracy", "version"))
    # A single evaluation may be of an unlucky version, so two consecutive evaluations must be below the best.
    later = [evaluation for evaluation in scored[-2:] if evaluation.version > best.version]
    then = run.windows[min(max(best.version - 1, 0) // WINDOW, len(run.windows) - 1)].get("reward")
    reward = run.mean("reward")
    falls = len(later) == 2 and all(progress.is_below(evaluation, best) for evaluation in later)
    if not falls or then is None or reward is None or reward <= then:
        return None
    return (
        f"held-out accuracy {later[-1].accuracy:.3f} after {best.accuracy:.3f} of version {best.version}, while the "
        f"reward rose from {then:.3f} to {reward:.3f}"
    )


def _few_effective(run: Evidence) -> str | None:
    values = sorted(run.series("ess"))
    # A policy can be ruined if a quarter of the updates has a low ESS, which the mean over all updates hides.
    if not values or (quartile := values[len(values) // 4]) >= FEW_EFFECTIVE:
        return None
    return f"ess is at most {quartile:.2f} in a quarter of the updates: few of the tokens count"


def _too_old(run: Evidence) -> str | None:
    share, bound = run.share("tokens_too_old", "tokens"), run.config.queue.bound
    if share > TOO_OLD:
        return f"{share:.0%} of the tokens are beyond queue.max_lag ({bound}) and are left out of the loss"
    dropped = ((run.summary and run.summary["dropped"]) or {}).get("too_old", 0)
    trained = (run.summary and run.summary["trajectories"]) or 0
    if dropped > TOO_OLD * (dropped + trained):
        return f"{dropped} trajectories beyond queue.max_lag ({bound}) were dropped, {trained} trained on"
    return None


def _mismatched(run: Evidence) -> str | None:
    mismatch = run.mean("mismatch")
    if mismatch is None or mismatch < MISMATCH:
        return None
    return f"mismatch {mismatch:.3g} nats a token between engine and learner with the same weights"


def _length_drifts(run: Evidence) -> str | None:
    first, length = _first(run, "length"), run.mean("length")
    if not first or length is None or 1 / DRIFTED < length / first < DRIFTED:
        return None
    return f"{length:.1f} tokens a completion, {first:.1f} in the first {WINDOW} updates"


def _truncated(run: Evidence) -> str | None:
    share = run.mean("truncated") or 0.0
    if share >= NEARLY_ALL:
        return f"nearly all completions ({share:.0%}) are cut off by {describe_limits(run.config)}"
    return f"{share:.0%} of the completions are cut off" if share > TRUNCATED and len(run.windows) > 1 else None


def _equal_groups(run: Evidence) -> str | None:
    share = run.mean("equal_groups") or 0.0
    if run.config.algorithm.compares_samples is None or share < EQUAL or run.is_solved:
        return None
    return f"{share:.0%} of the trajectories are in groups of equal scores, which have no signal"


def _rewards_fail(run: Evidence) -> str | None:
    failed = sum(((run.summary and run.summary["failed"]) or {}).values())
    stored = (run.summary and run.summary["trajectories"]) or 0
    if failed > FAILED * (failed + stored):
        return f"{failed} attempts failed, {stored} trajectories were trained on"
    if (last := run.evaluation) and last["failed"] > FAILED * (last["failed"] + last["count"]):
        return f"{last['failed']} of {last['failed'] + last['count']} held-out prompts have no score"
    return None


def _nothing_to_learn(run: Evidence) -> str | None:
    empty, steps = sum(run.series("empty_steps")), sum(run.series("steps"))
    return f"{empty:g} of {empty + steps:g} steps had no token left" if empty > EMPTY * (empty + steps) else None


# --- the pipeline --------------------------------------------------------------------------------------------


def _starved(run: Evidence) -> str | None:
    share = run.share("wait_s", "update_s")
    # Engines without GPUs use the learner's cores: the learner waits while engines sample, and more actors would not
    # shorten the wait.
    most = WAITS if run.config.rollout.gpus else WAITS_CPU
    return f"the learner waits {share:.0%} of its time" if share > most else None


def _blocked(run: Evidence) -> str | None:
    engines = run.summary and run.summary["engines"]
    # With segments, admission allows one version less. If engines may be only one version behind, they and the learner
    # take turns, and idle engines are not a fault.
    queue = run.config.queue
    ahead = queue.bound - (queue.segments is not None)
    most = IDLE if run.config.rollout.gpus else IDLE_CPU
    if not engines or engines["idle_share"] < most or ahead < LEAST_AHEAD:
        return None
    return f"the engines had nothing to decode {engines['idle_share']:.0%} of their time"


def _contexts_recomputed(run: Evidence) -> str | None:
    share = context_reuse.mean_shares(run.engines).contexts
    if share is None or share >= REUSED or not run.windows:
        return None
    return f"{1 - share:.0%} of the tokens of earlier turns were computed again"


def _first(run: Evidence, name: str) -> float | None:
    """Return the mean of a metric in the first window; None if there are fewer than two windows."""
    return run.windows[0].get(name) if len(run.windows) > 1 else None


RULES = (
    SignRule(
        "failures",
        f"more than {FAILED:.0%} of the attempts, or of the held-out prompts",
        "`streamppo reward-test` and the reasons below; raise timeout_s or attempts of the scorer",
        _rewards_fail,
    ),
    SignRule("failures depend on length", attempts.FIRES, attempts.ADVICE, Evidence.failures_by_length),
    SignRule(
        "steps without a token",
        f"more than {EMPTY:.0%} of the steps",
        "look at filters, rejections, equal groups and queue.max_lag",
        _nothing_to_learn,
    ),
    SignRule(
        "engine and learner differ",
        f"mismatch above {MISMATCH:g} nats a token at lag 0",
        "model.float32_head = true, the same dtype in both, rollout.engine.kv = 'recompute'; see docs/engines.md",
        _mismatched,
    ),
    SignRule(
        "lag at its bound",
        f"more than {TOO_OLD:.0%} of the data beyond queue.max_lag",
        "raise queue.max_lag, lower rollout.in_flight, add rollout actors, or shorten the longest completions",
        _too_old,
    ),
    SignRule(
        "cuts rest on the critic",
        f"more than {CUT:.0%} of the segments end in a cut, and explained variance is below {EXPLAINED:g}",
        "leave out queue.segments.max_tokens, for which the policy waits, or train on whole completions",
        _cuts_without_critic,
    ),
    SignRule(
        "gradient spikes",
        f"grad_norm above {SPIKE:g} times its median, in {SPIKES} of {WINDOW} updates of an unsolved task or before a "
        "fall of the reward; or a step left out because it was not finite",
        "lower learner.lr or learner.max_grad_norm, look at the batch with `streamppo inspect --update`",
        _gradient_spikes,
    ),
    SignRule(
        "clip fraction",
        f"above {CLIPPED:.0%} of the trained tokens",
        "lower learner.lr, epochs or minibatches, or set algorithm.target_kl",
        _clipped,
    ),
    SignRule(
        "KL spikes",
        f"a KL to the proximal, behavior or reference policy above {SPIKE_KL:g} and {SPIKE:g} times its median, in "
        f"{SPIKES} of {WINDOW} updates or before a fall of the reward",
        "lower learner.lr or learner.max_grad_norm, set algorithm.target_kl, lower queue.max_lag",
        _kl_spikes,
    ),
    SignRule(
        "ESS collapse",
        f"effective sample size below {FEW_EFFECTIVE:g} of the tokens in a quarter of the updates",
        "lower queue.max_lag or learner.lr, use a correction that truncates or rejects",
        _few_effective,
    ),
    SignRule(
        "policy hardly moves",
        f"several steps an update, no token clipped, and 98% of the ratios within {UNMOVED:g}",
        "raise learner.lr, or lower learner.epochs and learner.minibatches",
        _unmoved,
    ),
    SignRule(
        "explained variance",
        f"below {UNEXPLAINED:g} for {2 * WINDOW} updates, while the task is not solved",
        "raise algorithm.critic.lr or epochs, set algorithm.critic.warmup_updates, or have no critic",
        _explains_nothing,
    ),
    SignRule(
        "value loss diverges",
        f"rising, and above {DIVERGED:g} times its lowest window",
        "lower algorithm.critic.lr or coefficient, set algorithm.critic.clip, scale the reward down",
        _value_loss_diverges,
    ),
    SignRule(
        "equal groups",
        f"more than {EQUAL:.0%} of the trajectories, where samples are compared and the task is not solved",
        "zero_variance = 'resample', algorithm.curriculum, more samples_per_prompt, prompts of other difficulty, "
        "a finer reward",
        _equal_groups,
    ),
    SignRule(
        "entropy collapse",
        f"below {COLLAPSED:.0%} of the first {WINDOW} updates ({COLLAPSED / 2:.0%} if half of the wrong answers have "
        "become correct), while the task is unsolved and the reward no longer rises",
        "raise algorithm.entropy or use algorithm.entropy_control, lower learner.lr, widen the upper clip range",
        _entropy_collapses,
    ),
    SignRule(
        "completions are cut off",
        f"more than {TRUNCATED:.0%} of them after the first {WINDOW} updates; {NEARLY_ALL:.0%} in the first {EARLY}",
        "raise the limit of tokens, or filter cut-off completions (algorithm.filters), or pay for short answers",
        _truncated,
        early=True,
    ),
    SignRule(
        "length drifts",
        f"completions {DRIFTED:g} times as long, or short, as in the first {WINDOW} updates",
        "read samples: a reward, an aggregation by sequence or drops may favour a length",
        _length_drifts,
    ),
    SignRule(
        "reward rises while held-out falls",
        f"two evaluations {progress.SIGMAS:g} standard errors below the best, at a higher reward than the best had",
        "read samples for wrong answers that please the reward, add [algorithm.kl], stop at the best version",
        _held_out_falls,
    ),
    SignRule(
        "worse than at the start",
        f"held-out accuracy {progress.SIGMAS:g} standard errors below that of the first evaluation",
        "look at the other signs first, lower learner.lr; `streamppo export RUN --version N` gets the best version",
        _worse_than_at_start,
    ),
    SignRule(
        "starved learner",
        f"it waits more than {WAITS:.0%} of its time ({WAITS_CPU:.0%} without a GPU, where engines have its cores)",
        "add rollout actors or slots, shorten completions, raise queue.max_lag, look for a slow reward",
        _starved,
    ),
    SignRule(
        "blocked engines",
        f"idle more than {IDLE:.0%} of their time ({IDLE_CPU:.0%} without a GPU, where the learner has their cores), "
        f"with a queue.max_lag of at least {LEAST_AHEAD}, or {LEAST_AHEAD + 1} with segments",
        "fewer rollout actors or a faster learner; if it waits too, a larger queue.max_lag or rollout.in_flight",
        _blocked,
    ),
    SignRule(
        "contexts are computed again",
        f"less than {REUSED:.0%} of the tokens of earlier turns (contexts of at least 64 tokens) came from the cache",
        "more rollout.slots than rollout.in_flight, a larger cache of SGLang, rollout.engine.kv = 'keep' (embedded), "
        "agents that extend their conversation",
        _contexts_recomputed,
    ),
)
"""All rules: faults of data and pipeline, then faults of the update, then consequences, then slow stages."""
