"""The rules at work: on a run's lines as they are written, and on all of them afterwards.

Every `WINDOW` updates the rules look at the numbers, and at the end once more, with the summary; after the first
`EARLY` those look that need no more. A finding is new when its rule fires, and over when a later look does not see it;
it tells from which update to which it was seen.
"""

from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from streamppo.config.sections import Config
from streamppo.telemetry.diagnosis_rules import EARLY, RULES
from streamppo.telemetry.evidence import WINDOW, Evidence, Numbers
from streamppo.telemetry.metrics_file import EngineLine, EvaluationLine, Line, numbers
from streamppo.telemetry.summary import Summary


class Sign(NamedTuple):
    """A rule that fired: its newest numbers, advice, and the first and the last version at which it did.

    `holds` is true if it fired at the newest look.
    """

    name: str
    numbers: str
    advice: str
    first: int
    last: int
    holds: bool = True


class Diagnosis:
    """The findings about one run, by the rules' names, causes first; `newest` is the one that fired last."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recent: deque[Numbers] = deque(maxlen=WINDOW)
        self._windows: list[Numbers] = []
        self._evaluations: list[EvaluationLine] = []
        self._engines: dict[str, EngineLine] = {}
        self._seen = 0
        self._version = 0
        self._findings: dict[str, Sign] = {}
        self.newest: Sign | None = None

    @property
    def findings(self) -> dict[str, Sign]:
        """All findings, those that are over too: early ones, which are of settings, then in the order of the rules."""
        known = [self._findings[rule.name] for rule in RULES if rule.name in self._findings]
        return {one.name: one for one in sorted(known, key=lambda one: one.first > EARLY)}

    def add(self, line: Line) -> list[Sign]:
        """Take one more line of metrics.jsonl; returns the findings that are new, and those that no longer hold."""
        if "evaluation" in line:
            self._evaluations = sorted([*self._evaluations, line], key=lambda one: one["evaluation"])
        if "part" in line:
            self._engines = {}
        if "engine" in line:
            self._engines[line["engine"]] = line
        if "update" not in line:
            return []
        self._version = line["update"]
        self._recent.append(numbers(line))
        self._seen += 1
        if self._seen == EARLY:
            return self._look(None, early=True)
        if self._seen % WINDOW:
            return []
        self._windows.append(_means(self._recent))
        return self._look(None)

    def close(self, summary: Summary | None) -> list[Sign]:
        """Look once more, at the end; returns the findings that are new, and those that no longer hold."""
        if self._seen > WINDOW and self._seen % WINDOW:
            self._windows.append(_means(self._recent))
        return self._look(summary)

    def _look(self, summary: Summary | None, *, early: bool = False) -> list[Sign]:
        enough = self._recent if self._windows or early else ()
        engines = list(self._engines.values())
        evidence = Evidence(self._config, list(enough), self._windows, self._evaluations, summary, engines)
        changed: list[Sign] = []
        for rule in (rule for rule in RULES if rule.early or not early):
            before, numbers = self._findings.get(rule.name), rule.look(evidence)
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
    """Find everything there is to say about a run, by its lines in the order in which they were written.

    Causes come before consequences, and findings that are over are among them.
    """
    diagnosis = Diagnosis(config)
    for line in lines:
        diagnosis.add(line)
    diagnosis.close(summary)
    return list(diagnosis.findings.values())


def _means(updates: Iterable[Numbers]) -> Numbers:
    updates = list(updates)
    names = {name for update in updates for name in update}
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
