"""Functions that users bring to an update are told of by file and line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from streamppo.errors import TaskError
from streamppo.tasks import plugins


def test_a_function_that_fails_when_it_is_tried_is_told_with_its_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(inputs):\n    raise KeyError('advantage')\n")

    def try_it(function: Callable[..., object]) -> None:
        function(None)

    with pytest.raises(TaskError, match=r"^algorithm\.policy_loss\.function .*mine\.py:2: KeyError: 'advantage'"):
        plugins.load_and_try(f"{file}:loss", "algorithm.policy_loss.function", try_it)
