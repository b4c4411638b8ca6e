"""Exceptions of the program inside a test: a test fails unless its own words accept every one of them.

    iteration, `hasattr`, `Mapping.get`, a thread    take an exception for their own: the test goes on, and has failed
    `except`, `with`, functions called ...raises...  words of the test: what they take is accepted
    `except StopIteration`                           the end of an iteration of the test: it accepts none of the program

An exception is raised in the checker as Python's class with the program's message, so that `except ValueError` and
`pytest.raises` see what the program raised. Each is noted, and what is left at the end fails the test.
"""

import ast
import builtins
import sys
from types import TracebackType
from typing import Protocol

ITERATION = (StopIteration, StopAsyncIteration, GeneratorExit)
QUOTED = 300
"""Characters of a message that cross."""
ACCEPT, WATCH = "__accept__", "__watch__"
"""Names of a rewritten test. Names of this form are not mangled in classes."""


class Refused(TypeError):
    """The program gave what a test cannot use. No word of a test accepts it."""


class Manager(Protocol):
    """The object of a `with` statement."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Exceptions:
    """The exceptions of the program that no word of the test has accepted so far."""

    def __init__(self) -> None:
        self.left: list[BaseException] = []

    def record(self, error: BaseException) -> BaseException:
        """Return the exception, which fails the test unless it is accepted."""
        if isinstance(error, Refused) or not _expected():
            self.left.append(error)
        return error

    def names(self) -> dict[str, object]:
        """Return what a rewritten test calls."""
        return {ACCEPT: lambda: self._accept(sys.exc_info()[1]), WATCH: self._watch}

    def _accept(self, error: BaseException | None, *, raises: bool = False) -> None:
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                self._accept(one, raises=raises)
        if isinstance(error, Refused) or (isinstance(error, ITERATION) and not raises):
            return
        self.left = [one for one in self.left if one is not error]

    def _watch(self, manager: Manager) -> Manager:
        accept = self._accept

        class Watch:
            def __enter__(self) -> object:
                return type(manager).__enter__(manager)

            def __exit__(
                self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
            ) -> bool | None:
                taken = type(manager).__exit__(manager, kind, error, trace)
                if taken and error is not None:
                    accept(error, raises="raises" in type(manager).__name__.lower())
                return taken

        if not (hasattr(type(manager), "__enter__") and hasattr(type(manager), "__exit__")):
            raise TypeError(f"{type(manager).__name__!r} object does not support the context manager protocol")
        return Watch()


class _Words(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        accept = ast.Expr(ast.Call(ast.Name(ACCEPT, ast.Load()), [], []))
        node.body.insert(0, ast.copy_location(accept, node.body[0]))
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            call = ast.Call(ast.Name(WATCH, ast.Load()), [item.context_expr], [])
            item.context_expr = ast.copy_location(call, item.context_expr)
        return node


def rewritten(tree: ast.Module) -> ast.Module:
    """Have every `except` and `with` of a test say what it took."""
    return ast.fix_missing_locations(_Words().visit(tree))


def python_error(kind: str, text: str, arguments: list[object] | None) -> Exception:
    """Return an exception of Python's class `kind` whose message is `text`; of `RuntimeError` if there is none."""
    known = getattr(builtins, kind, None)
    if not isinstance(known, type) or not issubclass(known, Exception):
        known = RuntimeError
    for given in (arguments, [text]):
        # Some take other arguments: UnicodeDecodeError five, an ExceptionGroup a list.
        try:
            error = known(*given or [])
            if str(error) == text or given == [text]:
                return error
        except (TypeError, ValueError):
            continue
    return RuntimeError(text)


def _expected() -> bool:
    """Find out whether a library's `assertRaises`, `pytest.raises` or the like has called the program."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_filename != "test" and "raises" in frame.f_code.co_name.lower():
            return True
        frame = frame.f_back
    return False


def told(error: BaseException) -> str:
    """Name an exception with its message."""
    return f"{type(error).__name__}: {str(error)[:QUOTED]}"


def line_of(code: str, error: BaseException) -> str:
    """Return the line of the test that raised, "" if it was none."""
    trace = error.__traceback__
    lines = [0]
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "test":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return "".join(code.split("\n")[lines[-1] - 1 : lines[-1]]).strip()[:QUOTED]
