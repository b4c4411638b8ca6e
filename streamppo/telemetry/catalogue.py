"""Every line of metrics.jsonl, and every metric of an update by its name there, with its unit and meaning."""

from typing import NamedTuple

LINES = {
    "part": "a driver begins: the first with 1, another with each resume; after which version it goes on",
    "update": "the version that it made, its metrics",
    "remade": "the version whose line was lost, and the metrics that its archived batch tells",
    "redone": "the version that an update made once more; the update's line, of the first time, was there",
    "evaluation": "the version after which it was asked for; accuracy, prompts with and without a score, versions seen",
    "phases": "a process, with all its phases since it started: calls, wall seconds, CPU seconds; now and then",
    "queue": "trajectories that are ready, and those that are being sampled; now and then",
    "engine": "a rollout actor: its version, tokens, busy and idle seconds since it started, one completion; "
    "`prefix_reused`: share of the tokens of its prompts that came from the engine's cache",
    "restart": "the stage that died and is started again; why",
    "end": "the driver ends: `finished`, or why it ends early; a driver that was killed has no such line",
}
"""The kinds of lines, by a line's first name. Every line has `wall_s`: seconds of the run, over all its parts."""

BESIDE = {
    "update": "the version that it made",
    "wall_s": "seconds that the run has gone on for, over all its parts",
    "lag_histogram": "tokens of the batch that the policy sampled, by their lag in versions",
}
"""In every update's line, besides its metrics."""


PHASES = {
    "process": "the whole process, all of its threads; the rest beside its phases is overhead, and Ray",
    "admit": "rollout: tickets that came become trajectories in flight",
    "tokenize": "rollout: the prompts of new tickets into tokens, where no sample of them was seen before",
    "prefill": "rollout, embedded engine: prompts into its cache, and their first tokens",
    "decode": "rollout, embedded engine: a token for every running row",
    "swap": "rollout, embedded engine: new weights into its own form",
    "unpack": "rollout: a version made of the buckets that were pulled",
    "merge": "rollout: adapters that were pushed into the weights beside them",
    "reward": "rollout: from asking for a score to having it; waits, so no CPU time",
    "deliver": "rollout: finished trajectories into bytes",
    "issue": "queue: tickets, given or looked for",
    "store": "queue: delivered trajectories, checked and stored",
    "take": "queue: the choice of a batch, made or looked for",
    "journal": "queue: a transaction",
    "archive": "queue: the batch of a version",
    "fetch": "learner: from asking for a batch to having it, beside the update before; waits, so no CPU time",
    "pack": "learner: a batch into padded rows, beside the update before",
    "forward": "learner: every forward pass, of reference and teacher too",
    "targets": "learner: advantages, corrections, and what the loss needs of the whole batch",
    "loss": "learner: the loss of a micro-batch",
    "backward": "learner: the gradients of a micro-batch",
    "optimizer": "learner: clipping, and a step",
    "metrics": "learner: the numbers of an update",
    "snapshot": "learner: a copy of the weights, to push",
    "publish": "learner: the copy hashed, stored and made known, beside training",
}
"""In lines of phases, by the kind of process. Only the first rank has such a line."""

UPDATE = {
    "tokens": "tokens of the batch that the policy sampled",
    "tokens_too_old": "tokens of the batch beyond max_lag, left out of the loss",
    "tokens_trained": "tokens of the batch that are for the loss: young enough, of a group that teaches, not filtered",
    "tokens_idle": "tokens of rows that teach nothing, and are not passed over: distances below are not over them",
    "equal_groups": "share of trajectories whose whole group scored the same",
    "lag_mean": "versions, mean age of a token",
    "lag_max": "versions, greatest age of a token",
    "behavior_kl_k1": "nats per token, k1 estimate of KL(behavior || learner); may be negative",
    "behavior_kl": "nats per token, k3 estimate of KL(behavior || learner), before truncation",
    "ess": "effective sample size of learner / behavior per token, before truncation; 1 is on-policy",
    "ess_sequence": "the same for products over whole responses",
    "chi2": "chi-squared of learner from behavior per token: the variance that the weights add",
    "chi2_sequence": "the same for products over whole responses",
    "weights_high": "share of tokens with learner / behavior above 2",
    "weights_low": "share of tokens with learner / behavior below 1/2",
    "log_ppl_engine": "nats per token, -mean log-prob as the engine reported it",
    "log_ppl_learner": "nats per token, -mean log-prob as the learner computes it",
    "mismatch": "nats, mean |learner - behavior| of tokens of lag 0: numerics, not lag",
    "explained_variance": "share of the returns' variance that the critic explains",
    "policy_loss": "as algorithm.aggregation has it, mean over minibatches; 0 where the policy stands still",
    "value_loss": "as algorithm.aggregation has it, mean over minibatches",
    "value_clip_fraction": "share of trained tokens whose value was held at its clip, over all passes",
    "entropy": "nats per trained token, of the whole distribution or of the candidates', over all passes",
    "proximal_kl_k1": "nats per trained token, k1 estimate of KL(proximal || current), over all passes",
    "proximal_kl": "nats per trained token, k3 estimate of KL(proximal || current), over all passes",
    "clip_fraction_high": "share of trained tokens that the trust region held from above",
    "clip_fraction_low": "share of trained tokens that the trust region held from below",
    "ratio_p01": "1st percentile of current / proximal",
    "ratio_p50": "median of current / proximal",
    "ratio_p99": "99th percentile of current / proximal",
    "grad_norm": "in learner.norm, before clipping, mean over optimizer steps",
    "steps": "optimizer steps of the policy that were made",
    "bad_steps": "optimizer steps left out because the gradient, or the KL of target_kl, was not finite",
    "empty_steps": "optimizer steps left out because no token was left: too old, filtered, rejected, equal groups",
    "stopped_early": "1 if target_kl ended the update",
    "lr": "learning rate of the policy",
    "score_s": "seconds, proximal log-probs, values, targets",
    "train_s": "seconds, all optimizer steps",
    "wait_s": "seconds, waiting for the batch",
    "fetch_s": "seconds, fetching and packing the batch, beside the update before",
    "update_s": "seconds, all of the update",
    "push_ms": "milliseconds, the push before: hash, compare, publish, beside training",
    "push_mib": "MiB, the push before: what one rank put into the object store",
    "learner_tokens_per_s": "tokens of the batch, prompts included, a second of score_s and train_s, over all ranks",
    "learner_tflops": "10^12 operations a second of one rank: the policy's own, without what is computed again",
}
"""In every update's line. "learner" is its policy before the first step: in the scoring pass over the batch, or without
such a pass in the first pass over each row. "proximal" is the policy chosen by algorithm.proximal."""

SOMETIMES = {
    "reward": "mean reward of the batch's completions; with queue.segments, of those that ended in it, if any did",
    "length": "tokens of these that the policy sampled, mean per completion",
    "truncated": "share of these that were cut off, at max_tokens or at an environment's last turn",
    "segments_cut": "share of the batch's segments that were cut, and go on; with queue.segments",
    "outcomes_explained": "share of known outcomes that the critic explains: below 0.1 the policy waits (max_tokens)",
    "reference_kl": "nats per response, k3 estimate of KL(learner || first model), by weight; with [algorithm.kl]",
    "kl_beta": "weight of the KL in the reward; with [algorithm.kl]",
    "entropy_weight": "weight of the entropy bonus in this update; with [algorithm.entropy_control]",
    "admitted_lag": "versions, the lag that is admitted after this update; with an adaptive queue.max_lag",
    "lr_share": "share of the policy's learning rate left to this update; with an adaptive lag or learner.lr_by_ess",
    "singled_out": "share of the trained tokens that algorithm.exploration treats otherwise",
    "teacher_kl": "nats per token, k3 estimate of KL(proximal || teacher), by weight; with [algorithm.teacher]",
    "positive_nll": "nats per token of right answers, -mean log-prob by the learner; with algorithm.positive_nll",
    "critic_steps": "optimizer steps of a critic with a transformer of its own",
    "critic_grad_norm": "before clipping, mean over its optimizer steps",
    "candidates": "tokens that top-p and top-k left to draw from, mean over sampled tokens that they took any from",
    "expert_load": "tokens of the busiest expert over an even share, mean over layers; of a mixture of experts",
    "experts_idle": "share of the experts of all layers that no token of the update's passes went to",
    "routes_own": "share of the engine's choices of experts that the learner's routers make too; rollout.engine.routes",
    "mfu": "learner_tflops as a share of the GPU's dense bfloat16 peak; on a GPU whose peak is known",
    "peak_memory_mib": "MiB, most memory of tensors on rank 0 since the update before; on a GPU",
    "forced": "share of sampled tokens that had no alternative: log-prob 0, no gradient; with top-p or top-k",
    "reward_": "mean of one scorer or of one component of a reward, over the trajectories that have it",
    "filtered_": "share of sampled tokens that one of algorithm.filters leaves out; `_responses`: share of responses",
    "rejected_": "share of sampled tokens that one rule of the correction drops; `_responses`: share of responses",
    "ess_lag_": "effective sample size of the tokens of one bucket of lags: 0, 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, 65+",
    "behavior_kl_lag_": "nats per token, k3 estimate of KL(behavior || learner) of one bucket of lags",
}
"""In the lines of updates to which they apply; a name that ends in _ is followed by a bucket or a name."""

TRACKED = {
    "evaluation_accuracy": "share of held-out prompts that were answered rightly",
    "evaluation_failed": "held-out prompts of an evaluation without a score",
    "queue_ready": "trajectories that are ready to be trained on",
    "queue_in_flight": "trajectories that are being sampled",
    "engine_version_": "version of a rollout actor",
    "engine_tokens_": "tokens that a rollout actor has sampled since it started",
    "engine_busy_s_": "seconds that a rollout actor's engine was busy since it started",
    "engine_idle_s_": "seconds that a rollout actor's engine had nothing to do since it started",
    "engine_prefix_reused_": "share of the tokens of a rollout actor's prompts that its engine had in its cache: turns "
    "and samples that share a context",
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
