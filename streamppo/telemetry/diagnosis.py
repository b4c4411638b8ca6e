"""Applies the rules to a run's lines: to each line when it is written, or to all lines after the run.

The rules are checked every `WINDOW` updates, and once more at the end with the summary. Early rules are also checked
after the first `EARLY` updates. A finding begins when its rule fires, and ends at the first later check at which the
rule does not fire.
"""

from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from streamppo.config.sections import Config
from streamppo.telemetry import progress
from streamppo.telemetry.diagnosis_rules import EARLY, RULES
from streamppo.telemetry.evidence import WINDOW, Evidence, Numbers
from streamppo.telemetry.metrics_file import EngineLine, EvaluationLine, Line, numbers
from streamppo.telemetry.progress import ScoredVersion
from streamppo.telemetry.summary import Summary


class Sign(NamedTuple):
    """A rule that fired at the versions `first` to `last`. `holds` is true if the rule fired at the newest check."""

    name: str
    numbers: str
    advice: str
    first: int
    last: int
    holds: bool = True


class Diagnosis:
    """The findings about one run, by rule name, causes first. `newest` is the finding that was updated last."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recent: deque[Numbers] = deque(maxlen=WINDOW)
        self._windows: list[Numbers] = []
        self._scored: list[ScoredVersion] = []
        self._evaluation: EvaluationLine | None = None
        self._engines: dict[str, EngineLine] = {}
        self._num_updates = 0
        self._version = 0
        self._findings: dict[str, Sign] = {}
        self.newest: Sign | None = None

    @property
    def findings(self) -> dict[str, Sign]:
        """All findings, also ended ones: early findings (bad settings) first, then in the order of `RULES`."""
        signs = [self._findings[rule.name] for rule in RULES if rule.name in self._findings]
        return {sign.name: sign for sign in sorted(signs, key=lambda sign: sign.first > EARLY)}

    def add(self, line: Line) -> list[Sign]:
        """Add a line of metrics.jsonl; check the rules if due. Returns the findings that this check begins or ends."""
        if "evaluation" in line:
            progress.insert(self._scored, line)
            if self._evaluation is None or line["evaluation"] >= self._evaluation["evaluation"]:
                self._evaluation = line
        if "part" in line:
            self._engines = {}
        if "engine" in line:
            self._engines[line["engine"]] = line
        if "update" not in line:
            return []
        self._version = line["update"]
        self._recent.append(numbers(line))
        self._num_updates += 1
        if self._num_updates == EARLY:
            return self._check_rules(None, early=True)
        if self._num_updates % WINDOW:
            return []
        self._windows.append(_means(self._recent))
        return self._check_rules(None)

    def close(self, summary: Summary | None) -> list[Sign]:
        """Check the rules once more at the end of the run. Returns the findings that this check begins or ends."""
        if self._num_updates > WINDOW and self._num_updates % WINDOW:
            self._windows.append(_means(self._recent))
        return self._check_rules(summary)

    def _check_rules(self, summary: Summary | None, *, early: bool = False) -> list[Sign]:
        recent = list(self._recent) if self._windows or early else []
        engines = list(self._engines.values())
        evidence = Evidence(
            self._config, recent, self._windows, self._scored, self._evaluation, summary=summary, engines=engines
        )
        changed: list[Sign] = []
        for rule in (rule for rule in RULES if rule.early or not early):
            before, numbers = self._findings.get(rule.name), rule.check(evidence)
            if numbers is None and (before is None or not before.holds):
                continue
            if numbers is None and before is not None:
                changed.append(before._replace(holds=False))
                self._findings[rule.name] = changed[-1]
                continue
            first = before.first if before else self._version
            self.newest = Sign(rule.name, numbers or "", rule.advice, first, self._version)
            self._findings[rule.name] = self.newest
            changed += [] if before and before.holds else [self.newest]
        return changed


def diagnose_lines(config: Config, lines: Iterable[Line], summary: Summary | None) -> list[Sign]:
    """Return all findings, ended ones too, about the `lines` of a run in the order of writing. Causes come first."""
    diagnosis = Diagnosis(config)
    for line in lines:
        diagnosis.add(line)
    diagnosis.close(summary)
    return list(diagnosis.findings.values())


def _means(updates: Iterable[Numbers]) -> Numbers:
    updates = list(updates)
    names = {name for update in updates for name in update}
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
