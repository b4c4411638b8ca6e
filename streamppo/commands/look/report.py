"""Write a page about a run, or about several, that opens offline."""

from collections.abc import Sequence
from pathlib import Path

from streamppo.commands.console import echo
from streamppo.driver import report as reports


def report(found: Sequence[Path], to: Path | None) -> int:
    """Write the report of runs and replays to `to`: by default into the folder of a single run, else here."""
    single = len(found) == 1 and found[0].is_dir()
    echo(f"report: {reports.write(found, to or (found[0] / reports.REPORT if single else Path(reports.REPORT)))}")
    return 0
