"""Records the exceptions that the program raises in a test. The test fails unless its code accepts every exception.

    iteration, `hasattr`, `Mapping.get`, a thread    swallow an exception: the test continues, and has failed
    `except`, `with`, functions named ...raises...   code of the test: exceptions that they catch are accepted
    `except StopIteration`                           may end an iteration of the test, so it accepts no exception

An exception is raised in the checker as Python's class with the program's message, so that `except ValueError` and
`pytest.raises` work.
"""

import ast
import builtins
import sys
from contextlib import AbstractContextManager
from types import TracebackType

ITERATION = (StopIteration, StopAsyncIteration, GeneratorExit)
QUOTED = 300
"""An exception's message is cut to this many characters."""
ACCEPT, WATCH = "__accept__", "__watch__"
"""Names of functions that a rewritten test calls. Python does not mangle names of this form in classes."""


class Refused(TypeError):
    """The program returned something that a test cannot use. No code of a test accepts this exception."""


class Exceptions:
    """The program's exceptions that the test has not accepted so far."""

    def __init__(self) -> None:
        self.unaccepted: list[BaseException] = []

    def record(self, error: BaseException) -> BaseException:
        """Record an exception, which fails the test unless its code accepts the exception; return it."""
        if isinstance(error, Refused) or not _called_by_raises():
            self.unaccepted.append(error)
        return error

    def names(self) -> dict[str, object]:
        return {ACCEPT: lambda: self._accept(sys.exc_info()[1]), WATCH: self._watch}

    def _accept(self, error: BaseException | None, *, raises: bool = False) -> None:
        if isinstance(error, BaseExceptionGroup):
            for exception in error.exceptions:
                self._accept(exception, raises=raises)
        if isinstance(error, Refused) or (isinstance(error, ITERATION) and not raises):
            return
        self.unaccepted = [exception for exception in self.unaccepted if exception is not error]

    def _watch(self, manager: AbstractContextManager[object]) -> AbstractContextManager[object]:
        accept = self._accept

        class Watch:
            def __enter__(self) -> object:
                return type(manager).__enter__(manager)

            def __exit__(
                self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
            ) -> bool | None:
                is_caught = type(manager).__exit__(manager, kind, error, trace)
                if is_caught and error is not None:
                    accept(error, raises="raises" in type(manager).__name__.lower())
                return is_caught

        if not (hasattr(type(manager), "__enter__") and hasattr(type(manager), "__exit__")):
            raise TypeError(f"{type(manager).__name__!r} object does not support the context manager protocol")
        return Watch()


class _ReportCatches(ast.NodeTransformer):
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


def rewrite(tree: ast.Module) -> ast.Module:
    """Make every `except` and `with` of a test report the exceptions that it catches."""
    return ast.fix_missing_locations(_ReportCatches().visit(tree))


def python_error(kind: str, text: str, arguments: list[object] | None) -> Exception:
    """Return an exception of Python's class `kind` with message `text`; a `RuntimeError` if there is no such class."""
    known = getattr(builtins, kind, None)
    if not isinstance(known, type) or not issubclass(known, Exception):
        known = RuntimeError
    for attempted in (arguments, [text]):
        # Some classes take other arguments: UnicodeDecodeError takes five, an ExceptionGroup takes a list.
        try:
            error = known(*attempted or [])
            if str(error) == text or attempted == [text]:
                return error
        except (TypeError, ValueError):
            continue
    return RuntimeError(text)


def _called_by_raises() -> bool:
    """Return True if a function like `assertRaises` or `pytest.raises` called the program."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_filename != "test" and "raises" in frame.f_code.co_name.lower():
            return True
        frame = frame.f_back
    return False


def describe(error: BaseException) -> str:
    """Return an exception's class and message."""
    return f"{type(error).__name__}: {str(error)[:QUOTED]}"


def line_of(code: str, error: BaseException) -> str:
    """Return the line of the test that raised; "" if no line of the test did."""
    trace = error.__traceback__
    lines = [0]
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "test":
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return "".join(code.split("\n")[lines[-1] - 1 : lines[-1]]).strip()[:QUOTED]
