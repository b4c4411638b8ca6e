"""A whole run on a terminal: the live view is drawn, lines appear above it whole, and Ctrl-C is answered."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest
from terminal import resize, shown
from test_finished_run import NOISE
from test_on_a_cluster import ENDLESS, on_a_terminal
from test_run import gone, summary, wait_for_updates

COLUMNS = 80


@pytest.mark.slow
def test_a_run_draws_its_view_below_whole_lines_and_says_that_it_stops(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, *ENDLESS) as (process, terminal):
        resize(terminal, COLUMNS)
        found: list[bytes] = []
        reader = threading.Thread(target=read_into, args=(found, terminal), daemon=True)
        reader.start()
        wait_for_updates(tmp_path, 6)
        os.write(terminal, b"\x03")
        assert process.wait(120) == 128 + signal.SIGINT
        reader.join(10)
        assert gone(tmp_path)
    text = b"".join(found).decode()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "Ctrl-C: save a last checkpoint and end; twice: end at once" in plain and "making builtin:tiny" in plain
    assert not [word for word in NOISE if word in plain]
    rows = shown(text, COLUMNS)
    stopping = next(place for place, row in enumerate(rows) if row.startswith("SIGINT: stopping, a second signal"))
    begun = [row.split(" ")[0] for row in rows]
    assert begun.count("update") == begun.count("reward") == 1, "the view is there once: its last state"
    assert begun.index("update") > stopping
    assert (tmp_path / "math" / "checkpoints" / f"{summary(tmp_path)['updates']:08d}").is_dir()


def read_into(found: list[bytes], descriptor: int) -> None:
    """All output on a terminal, until it is closed."""
    try:
        while data := os.read(descriptor, 4096):
            found.append(data)
    except OSError:
        return
