"""Files and lines of user code, for messages about its errors."""

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

OURS = Path(__file__).parents[1]
PLUG_INS = tuple(str(OURS / "tasks" / name) for name in ("library", "scorers"))
"""Folders of this package whose code counts as user code."""
NOT_THEIRS = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, str(OURS))
"""Folders of files that are not user code."""


def format_user_error(error: BaseException) -> str:
    """Return an error's message, after the file and innermost line of user code in its traceback, if there is one."""
    message = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    place = _innermost(traceback.walk_tb(error.__traceback__))
    return f"{place}: {message}" if place else message


def locate_thread(thread: int) -> str:
    """Return "file:line" of a thread's innermost frame in user code; "" if there is none."""
    frame = sys._current_frames().get(thread)
    return _innermost(reversed(list(traceback.walk_stack(frame)))) if frame is not None else ""


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return "file:line" of the last user frame in `frames`, which come outermost first."""
    theirs = [(frame.f_code.co_filename, line) for frame, line in frames if _is_theirs(frame.f_code.co_filename)]
    return f"{Path(theirs[-1][0]).name}:{theirs[-1][1]}" if theirs else ""


def _is_theirs(name: str) -> bool:
    return name.endswith(".py") and (name.startswith(PLUG_INS) or not name.startswith(NOT_THEIRS))
