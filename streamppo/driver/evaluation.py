"""Evaluation during training: held-out prompts, in parts that actors answer concurrently.

The actors are those of `evaluation.actors`, or else the rollout actors, which go on sampling.

parts    one for each actor at work, and at least min(PARTS, prompts)
part i   prompts i, i + parts, i + 2 parts, ..., sent to actor i % actors at work
"""

from collections.abc import Callable

from ray import ObjectRef

from streamppo.driver.watch.rollout_pool import RolloutPool
from streamppo.driver.watch.watch import RunStage, WatchedCalls
from streamppo.types import EvaluationReport, decode

PARTS = 32
"""Parts of an evaluation with at least as many prompts. Each answered part counts as progress for the watchdog."""


def evaluate(
    calls: WatchedCalls,
    crew: RolloutPool,
    prompts: int,
    min_version: int,
    on_reports: Callable[[list[EvaluationReport]], None],
) -> None:
    """Request greedy answers by engines at `min_version` or later; call `on_reports` with the reports of all parts.

    While some actors are at work, actors that are still loading get no part. The part of a lost actor goes to another.
    """
    reports: list[EvaluationReport] = []
    parts = max(len(crew.answering()), min(PARTS, prompts))

    def collect(answer: bytes) -> None:
        reports.append(decode(answer, EvaluationReport))
        calls.reset_stall()
        if len(reports) == parts:
            on_reports(reports)

    def ask(part: int) -> ObjectRef[bytes]:
        actors = crew.answering()
        return actors[part % len(actors)].actor.evaluate.remote(part, parts, min_version)

    for part in range(parts):
        calls.watch(ask(part), RunStage.EVALUATION, collect, again=lambda part=part: ask(part))
