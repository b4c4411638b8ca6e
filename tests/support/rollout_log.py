"""A pytest plugin: the log lines of rollout."""

import logging
from collections.abc import Iterator

import pytest


class _Kept(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """The lines that rollout logs during the test, independent of other handlers."""
    lines: list[str] = []
    logger, handler = logging.getLogger("streamppo.rollout"), _Kept(lines)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
