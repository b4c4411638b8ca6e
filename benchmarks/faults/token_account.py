"""Where every token of a run with agents is: each is under one end, and agents have seen those that were trained on.

    sampled = trained + too old + left out + undelivered + failed + waiting + dropped

`sampled` is what the queue was told of, and what nobody received, which the rows of the archive and the journal know.
What was trained, too old or left out is counted by the learner, failures and what waits by the queue. The agents'
own notes (benchmarks/lib/witness_agent.py) are the tokens of the answers that they received, run by run: those of each
trajectory that is there are exactly its sampled tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from streamppo.config import file as configfile
from streamppo.driver import report
from streamppo.telemetry import metrics_file, summary
from streamppo.types import Trajectory, turns

DROPPED = ("too_old", "abandoned", "resampled", "dead_letters", "duplicates")
"""Ends of what the queue gives up, in its ledger."""


class TokenAccount(NamedTuple):
    """Tokens by their end; and trajectories whose tokens are not those that their agent received."""

    sampled: int
    trained: int
    too_old: int
    left_out: int
    undelivered: int
    failed: int
    waiting: int
    dropped: int
    seen_otherwise: int
    seen_twice: int

    @property
    def holds(self) -> bool:
        """True if every token has one end, and agents have seen what is there."""
        ends = self.trained + self.too_old + self.left_out + self.undelivered + self.failed + self.waiting
        return self.sampled == ends + self.dropped and not self.seen_otherwise and not self.seen_twice


def account(run: Path, there: Sequence[Trajectory], witness: Path) -> TokenAccount:
    """Account for the tokens of a run that has ended; `there` are the trajectories of archive and journal."""
    config, notes = configfile.load(run / configfile.CONFIG), list[str]()
    queue, _ = report.read_counters(config, run, notes)
    assert queue is not None, notes
    known = summary.updates_in_order(metrics_file.read(run))
    trained, too_old = (round(sum(line[name] for line in known)) for name in ("tokens_trained", "tokens_too_old"))
    ledger, lost = queue.tokens, sum(turns.undelivered(one.turns) for one in there)
    names = [one.explanation.strip() for one in there]
    return TokenAccount(
        sampled=ledger["delivered"] + lost,
        trained=trained,
        too_old=too_old,
        left_out=ledger["consumed"] - trained - too_old,
        undelivered=lost,
        failed=ledger["failed"],
        waiting=ledger["waiting"] + ledger["leased"],
        dropped=sum(ledger[name] for name in DROPPED),
        seen_otherwise=otherwise(there, read(witness)),
        seen_twice=len(names) - len(set(names)),
    )


def read(witness: Path) -> dict[str, int]:
    """Read the agents' notes: tokens that each run received."""
    lines = witness.read_text().splitlines() if witness.exists() else []
    return {name: int(count) for name, count in map(str.split, lines)}


def otherwise(there: Sequence[Trajectory], seen: Mapping[str, int]) -> int:
    """Count trajectories whose sampled tokens are not those that their agent received.

    An agent that hung up has not seen all: what it saw is among what was sampled, received or not.
    """
    found = 0
    for one in there:
        count, most = one.num_sampled, one.num_sampled + turns.undelivered(one.turns)
        noted = seen.get(one.explanation.strip(), -1)
        is_right = 0 <= noted <= most if one.explanation.startswith("gone-") else noted == count
        found += not is_right
    return found
