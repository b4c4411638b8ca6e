"""A headless Chromium: the page as it is after its scripts have run, and the errors in its console."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)


def opened(address: str, width: int, profile: Path, seconds: float | None = None) -> tuple[str, list[str]]:
    """The page at `address` and the console's errors, by default at once, else after seconds of the page's own clock.

    `profile` is a folder for the browser's files.
    """
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    flags += [f"--window-size={width},2000", f"--user-data-dir={profile}"]
    flags += [] if seconds is None else [f"--virtual-time-budget={1000 * seconds:.0f}"]
    done = subprocess.run(
        [CHROMIUM or "", *flags, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
