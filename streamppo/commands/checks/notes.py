"""Notes: settings that work, and are probably not meant."""

import os

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.algorithm import NoCorrection
from streamppo.config.sections import LOCAL, Config
from streamppo.tasks.task import Task


def notes(config: Config, task: Task | None) -> Findings:
    """Look for numbers that do not go together. `task` is None where it cannot be built."""
    learner, rollout, queue = config.learner, config.rollout, config.queue
    steps = learner.epochs * learner.minibatches
    if isinstance(config.algorithm.correction, NoCorrection) and queue.max_lag and steps > 1:
        yield _note(
            f'algorithm.correction is "off" with max_lag ({queue.max_lag}) and {steps} steps on each batch: old tokens '
            "count as new ones, and such runs learn less"
        )
    for name, updates in (("learner", learner), ("algorithm.critic", config.algorithm.critic)):
        if updates.warmup_updates >= config.updates:
            yield _note(f"{name}.warmup_updates ({updates.warmup_updates}) is the whole run ({config.updates} updates)")
    if rollout.in_flight < rollout.slots:
        yield _note(
            f"rollout.in_flight ({rollout.in_flight}) is below rollout.slots ({rollout.slots}): so many slots of an "
            "engine are never used"
        )
    yield from _cores(config)
    held_out = None if task is None else len(task.held_out(None))
    if held_out is not None and held_out < config.evaluation.prompts:
        yield _note(f"evaluation.prompts ({config.evaluation.prompts}) are more than the {held_out} that are held out")


def _cores(config: Config) -> Findings:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = config.learner.ranks * config.learner.threads + config.rollout.actors * config.rollout.threads
    if config.cluster.address == LOCAL and wanted > cores:
        yield _note(f"learner ranks and rollout actors have {wanted} threads, and this machine {cores} cores")


def _note(text: str) -> Finding:
    return Finding("settings", "note", text)
