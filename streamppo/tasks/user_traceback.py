"""Errors of user code: their types, and their messages with file and line."""

import asyncio
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parents[1]
PLUG_INS = tuple(str(PACKAGE / "tasks" / name) for name in ("library", "scorers"))
"""Folders of this package whose code counts as user code."""
NOT_USER_CODE = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, str(PACKAGE))
PACKAGES = ("site-packages", "dist-packages")
"""Names of folders of libraries, which may also be outside this environment."""


def is_of_user(error: BaseException) -> bool:
    """Return False for Ctrl-C, and for an error that cancels the running task or closes the running coroutine.

    Any other error is one of user code, also one that is no `Exception`, such as `SystemExit`, the cancellation of
    something that the code awaits, and the panic of a library in Rust.
    """
    if isinstance(error, asyncio.CancelledError):
        return not _is_cancelled()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # Without an event loop nothing is cancelled.
        return False
    return task is not None and task.cancelling() > 0


def format_user_error(error: BaseException) -> str:
    """Return "file:line: message" with the innermost line of user code, if known; for a group the joined messages."""
    return "; ".join(dict.fromkeys(map(_place_and_message, errors_of(error))))


def errors_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error itself or, for a group, all errors in it at any depth."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_of(inner)
    else:
        yield error


def describe(value: object, write: Callable[[object], str] = repr) -> str:
    """Return `write(value)`, or a description of the error if a user's `__repr__` or `__str__` raises."""
    try:
        return write(value)
    # User code may raise any exception.
    except Exception as error:
        return f"<{write.__name__}() raised {type(error).__name__}>"


def _place_and_message(error: BaseException) -> str:
    place, message = _innermost(traceback.walk_tb(error.__traceback__)), _message(error)
    return f"{place}: {message}" if place else message


def locate(error: BaseException) -> str:
    """Return "file:line" of the innermost user frame of the first cause of `error` that has one; "" without any.

    Example: a coroutine is cancelled at its time limit, where it awaits an answer.
    """
    places = [_innermost(traceback.walk_tb(one.__traceback__)) for one in _with_causes(error)]
    return next(filter(None, reversed(places)), "")


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return the error, its cause, the cause of that, and so on, each once: an error may be its own cause."""
    found = {id(error): error}
    while (cause := error.__cause__) is not None and id(cause) not in found:
        found[id(cause)] = error = cause
    return list(found.values())


def locate_in_stack(text: str) -> str:
    """Return "file:line" of the innermost user frame of a stack that `faulthandler` wrote; "" without any."""
    frames = re.findall(r'^  File "(.+)", line (\d+) in ', text, re.MULTILINE)
    return next((f"{Path(name).name}:{line}" for name, line in frames if _is_user_code(name)), "")


def _message(error: BaseException) -> str:
    match error:
        case SystemExit():
            return f"sys.exit({describe(error.code)})"
        case asyncio.CancelledError():
            return f"CancelledError: {describe(error, str) or 'something that it awaits was cancelled'}"
        case _:
            return f"{type(error).__name__}: {describe(error, str)}"


def locate_thread(thread: int) -> str:
    """Return "file:line" of a thread's innermost frame in user code; "" if there is none."""
    frame = sys._current_frames().get(thread)
    return _innermost(reversed(list(traceback.walk_stack(frame)))) if frame is not None else ""


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return "file:line" of the last user frame in `frames`, which come outermost first; "" if there is none."""
    user_frames = [
        (frame.f_code.co_filename, line) for frame, line in frames if _is_user_code(frame.f_code.co_filename)
    ]
    return f"{Path(user_frames[-1][0]).name}:{user_frames[-1][1]}" if user_frames else ""


def _is_user_code(name: str) -> bool:
    is_library = name.startswith(NOT_USER_CODE) or any(part in PACKAGES for part in Path(name).parts)
    return name.endswith(".py") and (name.startswith(PLUG_INS) or not is_library)
