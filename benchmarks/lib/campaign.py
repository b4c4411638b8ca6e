"""The results of a campaign of many runs, each written as soon as it is measured.

A repeated command continues after the existing rows: a campaign may be stopped at any time and measured in parts.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Campaign:
    """The rows of `out.jsonl`, next to `--json out.json`; without `--json` they are kept only in this process."""

    def __init__(self, path: Path | None) -> None:
        self._log = path.with_suffix(".jsonl") if path else None
        text = self._log.read_text() if self._log and self._log.exists() else ""
        self.rows: list[Row] = [json.loads(line) for line in text.splitlines()]

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """Return the row with all values of `key`, if there is one."""
        return next((row for row in self.rows if all(row.get(name) == key[name] for name in key)), None)

    def add(self, row: Row) -> None:
        """Add a row, and write it."""
        self.rows.append(row)
        if self._log:
            with self._log.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def row(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
        """Return the row with all values of `key`; if there is none, measure and add it."""
        found = self.find(key)
        if found is None:
            found = {**key, **measure()}
            self.add(found)
        return found
