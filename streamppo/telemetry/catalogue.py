"""Every line of metrics.jsonl, and every metric of an update by its name there, with its unit and meaning."""

from typing import NamedTuple

LINES = {
    "part": "a driver begins: 1, and one more with each resume; the version after which it continues",
    "update": "the version that it made, its metrics",
    "remade": "the version whose line was lost, with the metrics of its archived batch",
    "redone": "the version of an update made once more; its first line stays",
    "evaluation": "its version; accuracy, prompts with and without a score, versions seen",
    "phases": "a process, with its phases since it started: calls, wall seconds, CPU seconds",
    "queue": "trajectories that are ready, and that are being sampled; the prompts skipped so far by "
    "algorithm.curriculum",
    "engine": "a rollout actor: its version, tokens, busy and idle seconds, one completion; `prefix_reused`, "
    "`context_reused`, `kv_age`, `kv_ages`: what its cache had (docs/engines.md); `agents`: requests by their outcome",
    "restart": "a stage that died, and why",
    "end": "the driver ends: `finished`, or why it ends early",
}
"""The kinds of lines, by a line's first name. Every line has `wall_s`: seconds of the run, over all its parts."""

BESIDE = {
    "update": "the version that it made",
    "wall_s": "seconds that the run has lasted, over all its parts",
    "lag_histogram": "tokens of the batch that the policy sampled, by their lag in versions",
}
"""In every update's line, besides its metrics."""


PHASES = {
    "process": "the whole process, with Ray and overhead",
    "admit": "rollout: tickets become trajectories in flight",
    "tokenize": "rollout: new prompts into tokens",
    "prefill": "rollout, embedded: prompts into the cache, and their first tokens",
    "decode": "rollout, embedded: a token for every running row",
    "swap": "rollout, embedded: new weights into its form",
    "unpack": "rollout: pulled buckets into a version",
    "merge": "rollout: pushed adapters into the weights",
    "reward": "rollout: the wait for a score; no CPU time",
    "deliver": "rollout: finished trajectories into bytes",
    "issue": "queue: tickets",
    "store": "queue: trajectories, checked and stored",
    "take": "queue: the choice of a batch",
    "journal": "queue: a transaction",
    "archive": "queue: the batch of a version",
    "fetch": "learner: the wait for a batch, during the previous update; no CPU time",
    "pack": "learner: a batch into padded rows, during the previous update",
    "forward": "learner: every forward pass",
    "targets": "learner: advantages and corrections",
    "loss": "learner: the loss of a micro-batch",
    "backward": "learner: the gradients of a micro-batch",
    "optimizer": "learner: clipping, and a step",
    "metrics": "learner: the numbers of an update",
    "snapshot": "learner: a copy of the weights, to push",
    "publish": "learner: the copy hashed and stored, during training",
}
"""In lines of phases, by the kind of process. Only the first rank has such a line."""

UPDATE = {
    "tokens": "tokens of the batch that the policy sampled",
    "tokens_too_old": "tokens of the batch beyond max_lag, left out of the loss",
    "tokens_trained": "tokens of the batch that are in the loss",
    "tokens_idle": "tokens of rows without a pass or gradient; not in the distances below",
    "equal_groups": "share of trajectories whose whole group scored the same",
    "lag_mean": "versions, mean age of a token",
    "lag_max": "versions, greatest age of a token",
    "behavior_kl_k1": "nats per token, k1 estimate of KL(behavior || learner)",
    "behavior_kl": "nats per token, k3 estimate of KL(behavior || learner), before truncation",
    "ess": "effective sample size of learner / behavior per token, before truncation",
    "ess_sequence": "the same for products over whole responses",
    "chi2": "chi-squared divergence of learner from behavior per token: the variance added by the weights",
    "chi2_sequence": "the same for products over whole responses",
    "weights_high": "share of tokens with learner / behavior above 2",
    "weights_low": "share of tokens with learner / behavior below 1/2",
    "log_ppl_engine": "nats per token, -mean log-prob as the engine reported it",
    "log_ppl_learner": "nats per token, -mean log-prob as the learner computes it",
    "mismatch": "nats, mean |learner - behavior| of tokens of lag 0: numerics, not lag",
    "explained_variance": "share of the returns' variance that the critic explains",
    "policy_loss": "by algorithm.aggregation, mean over minibatches",
    "value_loss": "by algorithm.aggregation, mean over minibatches",
    "value_clip_fraction": "share of trained tokens whose value was clipped",
    "entropy": "nats per trained token",
    "proximal_kl_k1": "nats per trained token, k1 estimate of KL(proximal || current)",
    "proximal_kl": "nats per trained token, k3 estimate of KL(proximal || current)",
    "clip_fraction_high": "share of trained tokens clipped from above",
    "clip_fraction_low": "share of trained tokens clipped from below",
    "ratio_p01": "1st percentile of current / proximal",
    "ratio_p50": "median of current / proximal",
    "ratio_p99": "99th percentile of current / proximal",
    "grad_norm": "in learner.norm, before clipping, mean over optimizer steps",
    "steps": "optimizer steps of the policy",
    "bad_steps": "optimizer steps left out: gradient or KL of target_kl not finite",
    "empty_steps": "optimizer steps left out: no token was left",
    "stopped_early": "1 if target_kl ended the update",
    "lr": "learning rate of the policy",
    "score_s": "seconds, proximal log-probs, values, targets",
    "train_s": "seconds, all optimizer steps",
    "wait_s": "seconds, waiting for the batch",
    "fetch_s": "seconds, fetching and packing, during the previous update",
    "update_s": "seconds, all of the update",
    "push_ms": "milliseconds, the previous push, during training",
    "push_mib": "MiB, the previous push, of one rank",
    "learner_tokens_per_s": "tokens, prompts included, a second of score_s and train_s, over all ranks",
    "learner_tflops": "10^12 operations a second of one rank, without recomputation",
}
"""In every update's line. "learner" is its policy before the first step: in the scoring pass over the batch, or without
such a pass in the first pass over each row. "proximal" is the policy chosen by algorithm.proximal."""

SOMETIMES = {
    "reward": "mean reward of the batch's completions that ended",
    "length": "sampled tokens of these, mean",
    "truncated": "share of these that were cut off",
    "segments_cut": "share of the batch's segments that continue",
    "outcomes_explained": "share of known outcomes that the critic explains",
    "reference_kl": "nats per response, k3 estimate of KL(learner || reference); with [algorithm.kl]",
    "kl_beta": "weight of the KL in the reward; with [algorithm.kl]",
    "entropy_weight": "weight of the entropy bonus; with [algorithm.entropy_control]",
    "admitted_lag": "versions, the lag admitted next; with an adaptive queue.max_lag",
    "lr_share": "share of the learning rate that is left; with an adaptive lag or learner.lr_by_ess",
    "singled_out": "share of the trained tokens that algorithm.exploration selects",
    "teacher_kl": "nats per token, k3 estimate of KL(proximal || teacher)",
    "positive_nll": "nats per token of right answers, -mean log-prob",
    "critic_steps": "optimizer steps of a critic with a separate transformer",
    "critic_grad_norm": "before clipping, mean over its optimizer steps",
    "candidates": "mean number of tokens left by top-p and top-k",
    "expert_load": "tokens of the busiest expert over an even share, mean over layers",
    "experts_idle": "share of the experts without a token",
    "routes_own": "share of the engine's choices of experts that the learner shares",
    "mfu": "learner_tflops as a share of the GPU's dense bfloat16 peak",
    "peak_memory_mib": "MiB, most GPU memory of tensors on rank 0",
    "forced": "share of sampled tokens without an alternative, with top-p or top-k",
    "reward_": "mean of a scorer or component, over the trajectories that have it",
    "filtered_": "share of sampled tokens that a filter leaves out; `_responses`: of responses",
    "rejected_": "share of sampled tokens that a rule drops; `_responses`: of responses",
    "ess_lag_": "effective sample size of a bucket of lags",
    "behavior_kl_lag_": "nats per token, k3 estimate of KL(behavior || learner) of a bucket",
}
"""In the lines of updates to which they apply; a name that ends in _ is followed by a bucket or a name."""

TRACKED = {
    "evaluation_accuracy": "share of held-out prompts with a correct answer",
    "evaluation_failed": "held-out prompts of an evaluation without a score",
    "queue_ready": "trajectories that are ready to be trained on",
    "queue_in_flight": "trajectories that are being sampled",
    "skipped_prompts": "prompts skipped so far by algorithm.curriculum",
    "engine_version_": "version of a rollout actor",
    "engine_tokens_": "tokens that a rollout actor has sampled since it started",
    "engine_busy_s_": "seconds that a rollout actor's engine was busy since it started",
    "engine_idle_s_": "seconds that a rollout actor's engine had nothing to do since it started",
    "engine_prefix_reused_": "share of the tokens of a rollout actor's prompts that its engine had in its cache: turns "
    "and samples that share a context",
    "engine_context_reused_": "share of earlier turns' contexts that a rollout actor's engine reused; 1 is possible",
    "engine_kv_age_": "versions, mean age of the weights that computed a rollout actor's reused tokens",
    "restarts_": "deaths of a stage that this part of the run has survived",
}
"""Only in trackers and Prometheus, besides the metrics of updates: numbers of other lines, named as above."""

ENTRIES = {"wall_s": BESIDE["wall_s"], **UPDATE, **SOMETIMES, **TRACKED}
"""All numbers sent to trackers and Prometheus."""


class CatalogueEntry(NamedTuple):
    """A name of the catalogue and its text; `of` is the rest of a metric's name after a catalogue name ending in _."""

    name: str
    of: str
    text: str


def find(metric: str) -> CatalogueEntry | None:
    """Find the entry of a metric of an update or of `TRACKED`; None if there is none."""
    if text := ENTRIES.get(metric):
        return CatalogueEntry(metric, "", text)
    begin = next((name for name in ENTRIES if name[-1] == "_" and metric.startswith(name)), "")
    return CatalogueEntry(begin, metric.removeprefix(begin), ENTRIES[begin]) if begin else None
