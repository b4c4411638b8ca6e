"""Polls `streamppo watch` of a run every 0.2 s, as its page does, and counts replies and errors.

Errors are replies with a status other than 200, sections that could not be made, notes about unreadable files, and
negative counts.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

EVERY_S, START_S = 0.2, 60.0
NOTE = re.compile('<p class="none">([^<]*)')
"""The reason why a section could not be made, or what could not be read."""
EMPTY = "No update has been made."
NEGATIVE = re.compile(r'<td class="number">-[0-9,]+</td>')
"""A negative count: the difference of counts of two versions."""
NO_BATCH = "no batch is kept in its archive yet"
"""The page's answer until the first batch is written."""


class Poll:
    """The number of replies so far, and the number of each error."""

    def __init__(self, run: Path, environment: Mapping[str, str]) -> None:
        self.replies, self.errors = 0, Counter[str]()
        self._run, self._environment, self._over = run, environment, Event()

    def follow(self) -> None:
        """Start the page and poll it until `end`."""
        command = [sys.executable, "-m", "streamppo", "watch", str(self._run)]
        with subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, text=True) as page:
            try:
                assert page.stdout
                address = re.search(r"http://[^\s#]+", page.stdout.readline())
                assert address, "the page did not say its address"
                self._ask(address[0])
            except (AssertionError, OSError) as error:
                self.errors[f"{type(error).__name__}: {error}"] += 1
            finally:
                page.kill()

    def _ask(self, address: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urlopen(address, timeout=START_S).close()
                break
            time.sleep(EVERY_S)
        while not self._over.wait(EVERY_S):
            for text in self._reply(f"{address}sections").get("sections", {}).values():
                self.errors.update(note for note in NOTE.findall(text) if note != EMPTY)
                self.errors.update(NEGATIVE.findall(text))
            if update := self._reply(f"{address}batch").get("update"):
                self._reply(f"{address}batch/{update}/0")

    def _reply(self, address: str) -> dict[str, Any]:
        self.replies += 1
        try:
            with urlopen(address, timeout=START_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            if NO_BATCH not in (text := error.read().decode()):
                self.errors[f"{error.code}: {text[:300]}"] += 1
        except TimeoutError:
            self.errors[f"no reply within {START_S:g} s"] += 1
        return {}

    def end(self) -> None:
        """Stop polling."""
        self._over.set()


@contextlib.contextmanager
def polled(run: Path, environment: Mapping[str, str]) -> Iterator[Poll]:
    """Poll the page of a run from a thread during the block."""
    poll = Poll(run, environment)
    thread = Thread(target=poll.follow)
    thread.start()
    try:
        yield poll
    finally:
        poll.end()
        thread.join()
