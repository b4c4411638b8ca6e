"""Draws the report's curves in a notebook, again and again during the run."""

import sys
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Protocol, cast

from streamppo.telemetry import metrics_file
from streamppo.telemetry.report import page
from streamppo.telemetry.report.view import View

DRAW_S = 5.0
"""Minimum seconds between two drawings. A drawing takes about 10 ms in the notebook's process."""
HEIGHT = 560
"""Height of the iframe in pixels. The page in the iframe scrolls."""


class _Display(Protocol):
    def update(self, shown: object) -> None: ...


def charts(folder: Path) -> str:
    """Return HTML with a run's curves. An iframe keeps the curves' style sheet out of the notebook."""
    curves = page.curves(View(folder.name, metrics_file.read(folder)))
    frame = f'<iframe srcdoc="{escape(curves)}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'
    # IPython warns about HTML that is an iframe without a surrounding element.
    return f"<div>{frame}</div>"


def watcher() -> Callable[[Path], None] | None:
    """Return a function that draws the curves of a run's folder in the current cell; None outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    # IPython's shell has a kernel in a notebook, but not in a terminal.
    return _Curves().draw if shell is not None and hasattr(shell, "kernel") else None


class _Curves:
    def __init__(self) -> None:
        self._display: _Display | None = None
        self._drawn_at = 0.0
        self._length = -1

    def draw(self, folder: Path) -> None:
        path = folder / metrics_file.METRICS
        length = path.stat().st_size if path.exists() else 0
        if length == self._length or time.monotonic() - self._drawn_at < DRAW_S:
            return
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        self._drawn_at, self._length = time.monotonic(), length
        html = HTML(charts(folder))
        if self._display is None:
            self._display = cast(_Display, display(html, display_id=True))
        else:
            self._display.update(html)
