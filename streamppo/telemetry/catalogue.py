"""The kinds of lines in metrics.jsonl, and the metrics of updates, each with its unit and meaning."""

from typing import NamedTuple

LINES = {
    "part": "a driver begins: its number (1 plus earlier resumes) and the version from which it continues",
    "update": "an update ends: the version that it made, and its metrics",
    "remade": "an update's line was lost: its version, and the metrics that its archived batch gives",
    "redone": "an update was repeated: its version",
    "evaluation": "an evaluation of a version ends: accuracy, numbers of prompts with and without a score, versions "
    "of the answers",
    "phases": "a process reports its phases since its start: calls, wall seconds, CPU seconds",
    "queue": "the queue reports the trajectories that are ready and in flight, and the prompts that "
    "algorithm.curriculum has skipped so far",
    "engine": "a rollout actor reports its version, tokens, busy and idle seconds, and one completion; "
    "`prefix_reused`, `context_reused`, `kv_age` and `kv_ages` describe its cache (docs/engines.md); `agents` counts "
    "requests by outcome",
    "restart": "a stage died and is restarted: the stage and the reason",
    "end": "the driver ends: `finished`, or the reason for an early end",
}
"""The first name in a line of metrics.jsonl is its kind. Every line has `wall_s`, the run's seconds over all parts."""

BESIDE = {
    "update": "the version that it made",
    "wall_s": "seconds of the run, including earlier parts",
    "lag_histogram": "sampled tokens of the batch, by lag",
}
"""Entries of an update's line that are not metrics."""

PHASES = {
    "process": "the whole process, with Ray and overhead",
    "admit": "rollout: start trajectories for tickets",
    "tokenize": "rollout: tokenize new prompts",
    "prefill": "rollout, embedded: prefill prompts",
    "decode": "rollout, embedded: sample a token for every running row",
    "swap": "rollout, embedded: convert new weights to the engine's form",
    "unpack": "rollout: read a version from pulled buckets",
    "merge": "rollout: merge pushed adapters into the weights",
    "reward": "rollout: wait for a score (no CPU time)",
    "deliver": "rollout: encode finished trajectories",
    "issue": "queue: issue tickets",
    "store": "queue: check and store trajectories",
    "take": "queue: choose a batch",
    "journal": "queue: commit a transaction",
    "archive": "queue: write a batch to the archive",
    "fetch": "learner: wait for the next batch (no CPU time)",
    "pack": "learner: pack the next batch into padded rows",
    "forward": "learner: forward passes",
    "targets": "learner: advantages and corrections",
    "loss": "learner: loss of a micro-batch",
    "backward": "learner: gradients of a micro-batch",
    "optimizer": "learner: clip gradients and make a step",
    "metrics": "learner: metrics of an update",
    "snapshot": "learner: copy the weights for a push",
    "publish": "learner: hash and store the copy, during training",
}
"""The phases that lines of kind "phases" report. Of the learner's ranks, only rank 0 reports phases."""

UPDATE = {
    "tokens": "sampled tokens of the batch",
    "tokens_too_old": "tokens of the batch beyond max_lag",
    "tokens_trained": "tokens of the batch that are in the loss",
    "tokens_idle": "tokens of rows without a pass, which the KL metrics exclude",
    "equal_groups": "share of trajectories whose group has equal scores only",
    "lag_mean": "versions, mean age of a token",
    "lag_max": "versions, greatest age of a token",
    "behavior_kl_k1": "nats per token, k1 estimate of KL(behavior || learner)",
    "behavior_kl": "nats per token, k3 estimate of KL(behavior || learner), before truncation",
    "ess": "effective sample size of learner / behavior per token, before truncation",
    "ess_sequence": "effective sample size of products of learner / behavior over responses",
    "chi2": "chi-squared divergence of learner from behavior per token",
    "chi2_sequence": "chi-squared divergence by products of learner / behavior over responses",
    "weights_high": "share of tokens with learner / behavior above 2",
    "weights_low": "share of tokens with learner / behavior below 1/2",
    "log_ppl_engine": "nats per token, -mean log-prob as the engine reported it",
    "log_ppl_learner": "nats per token, -mean log-prob as the learner computes it",
    "explained_variance": "share of the returns' variance that the critic explains",
    "policy_loss": "policy loss, averaged by algorithm.aggregation, mean over minibatches",
    "value_loss": "value loss, averaged by algorithm.aggregation, mean over minibatches",
    "value_clip_fraction": "share of trained tokens whose value was clipped",
    "proximal_kl_k1": "nats per trained token, k1 estimate of KL(proximal || current)",
    "proximal_kl": "nats per trained token, k3 estimate of KL(proximal || current)",
    "clip_fraction_high": "share of trained tokens clipped from above",
    "clip_fraction_low": "share of trained tokens clipped from below",
    "grad_norm": "gradient norm (learner.norm) before clipping, mean over optimizer steps",
    "steps": "optimizer steps of the policy",
    "bad_steps": "optimizer steps skipped for a gradient or KL that is not finite",
    "empty_steps": "optimizer steps skipped for lack of tokens",
    "stopped_early": "1 if target_kl ended the update",
    "lr": "learning rate of the policy",
    "score_s": "seconds for proximal log-probs, values and targets",
    "train_s": "seconds for all optimizer steps",
    "wait_s": "seconds of waiting for the batch",
    "fetch_s": "seconds for fetching and packing the batch (during the previous update)",
    "update_s": "seconds for the whole update",
    "push_ms": "milliseconds of the previous push, during training",
    "push_mib": "MiB of the previous push, of one rank",
    "learner_tokens_per_s": "tokens, with prompts, per second of score_s and train_s, over all ranks",
    "learner_tflops": "10^12 operations per second of one rank, without recomputation",
}
"""Metrics of every update. "learner" is the learner's policy in its first pass over each row: the scoring pass before
the first step or, without a scoring pass, the first training pass. "proximal" is the policy that algorithm.proximal
chooses."""

SOMETIMES = {
    "reward": "mean reward of completions that end in the batch",
    "length": "mean sampled tokens of completions that end in the batch",
    "truncated": "share of completions that were cut off, of those that end in the batch",
    "segments_cut": "share of the batch's segments that are followed by another segment",
    "outcomes_explained": "share of the known outcomes' variance that the critic explains",
    "entropy": "nats per trained token, if there is one",
    "ratio_p01": "1st percentile of current / proximal",
    "ratio_p50": "median of current / proximal",
    "ratio_p99": "99th percentile of current / proximal",
    "mismatch": "nats, mean |learner - behavior| log-prob of tokens of lag 0",
    "reference_kl": "nats per response, k3 estimate of KL(learner || reference)",
    "kl_beta": "weight of the KL in the reward",
    "entropy_weight": "weight of the entropy bonus, with algorithm.entropy_control",
    "admitted_lag": "versions, admitted lag from the next update on, with an adaptive queue.max_lag",
    "lr_share": "learning rate as a share of learner.lr, with learner.lr_by_ess",
    "singled_out": "share of the trained tokens that algorithm.exploration selects",
    "teacher_kl": "nats per token, k3 estimate of KL(proximal || teacher)",
    "positive_nll": "nats per token of correct answers, -mean log-prob",
    "critic_steps": "optimizer steps of a second transformer as critic",
    "critic_grad_norm": "gradient norm of this critic before clipping, mean over its steps",
    "candidates": "mean candidates of a token, with top-p or top-k",
    "expert_load": "tokens of the busiest expert / an even share, mean over layers",
    "experts_idle": "share of the experts without a token",
    "routes_own": "share of the engine's expert choices that the learner's routers make too",
    "mfu": "learner_tflops as a share of the GPU's dense bfloat16 peak",
    "peak_memory_mib": "MiB, peak GPU memory of tensors on rank 0",
    "forced": "share of sampled tokens with a single candidate",
    "reward_": "mean of a scorer or component, over the trajectories that have it",
    "filtered_": "share of sampled tokens that a filter drops; `..._responses`: share of responses that lose a token",
    "rejected_": "share of sampled tokens that a rule drops; `..._responses`: share of responses that lose a token",
    "ess_lag_": "effective sample size of the tokens in a bucket of lags",
    "behavior_kl_lag_": "nats per token, k3 estimate of KL(behavior || learner) in a bucket of lags",
}
"""Metrics that only some updates have. After a final _ comes a scorer, component, filter, rule or lag bucket."""

TRACKED = {
    "evaluation_accuracy": "share of held-out prompts with a correct answer",
    "evaluation_failed": "number of held-out prompts without a score in an evaluation",
    "queue_ready": "trajectories that are ready to be trained on",
    "queue_in_flight": "trajectories that are being sampled",
    "skipped_prompts": "prompts skipped so far by algorithm.curriculum",
    "engine_version_": "version of a rollout actor",
    "engine_tokens_": "tokens that a rollout actor has sampled since its start",
    "engine_busy_s_": "seconds that a rollout actor's engine was busy since its start",
    "engine_idle_s_": "seconds that a rollout actor's engine had nothing to do since its start",
    "engine_prefix_reused_": "share of a rollout actor's prompt tokens that came from its engine's cache, because "
    "turns or samples share a context",
    "engine_context_reused_": "share of the tokens of earlier turns that a rollout actor's engine reused; up to 1",
    "engine_kv_age_": "versions, mean age of the weights that computed a rollout actor's reused tokens",
    "restarts_": "number of restarts of a stage in this part of the run",
}
"""Numbers that trackers and Prometheus get from lines of other kinds than "update" and "remade"."""

ENTRIES = {"wall_s": BESIDE["wall_s"], **UPDATE, **SOMETIMES, **TRACKED}
"""All numbers sent to trackers and Prometheus."""


class CatalogueEntry(NamedTuple):
    """A name of the catalogue and its text. Example: `ess_lag_3-4` has the name `ess_lag_`, and `of` is "3-4"."""

    name: str
    of: str
    text: str


def find(metric: str) -> CatalogueEntry | None:
    """Return the entry of a metric of an update or of `TRACKED`; None if the catalogue has none."""
    if text := ENTRIES.get(metric):
        return CatalogueEntry(metric, "", text)
    begin = next((name for name in ENTRIES if name[-1] == "_" and metric.startswith(name)), "")
    return CatalogueEntry(begin, metric.removeprefix(begin), ENTRIES[begin]) if begin else None
