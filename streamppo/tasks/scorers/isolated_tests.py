"""Runs a test and the tested program in two processes: only calls, and values as data, pass between them.

    checker    runs the tests with stand-ins for the program's names, and returns the operations that it needs
    program    runs the program, executes the operations, and answers each with data or with "an object"

The processes never communicate directly: the scorer passes the checker's operations to the program and the answers
back, until every test has ended. So the program sees only inputs. In the checker the program's answers are plain values
of Python's types, so that no class of the program can take part in a comparison.

Sandboxes lack our package. So sandboxes get the source of this file, after the sources of plain_data.py and
exceptions.py, the only modules of ours that this file imports.
"""

import ast
import builtins
import itertools
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO, TypeAlias, cast

from streamppo.tasks.scorers.exceptions import QUOTED, Exceptions, Refused, describe, line_of, python_error, rewrite
from streamppo.tasks.scorers.plain_data import Data, NotData, as_list, data_alone, decode, encode

Operation: TypeAlias = dict[str, Data]
"""{"do": "name" | "call" | "attribute" | "items", ...}; {"answer": n} is the value of the n-th operation."""

ITEMS = 100_000
"""Maximum number of items taken from an iterator of the program."""
OPERATIONS = 2_000
"""Maximum number of operations of one test."""
OBJECT = object()
UNREADABLE = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, MemoryError),
    *(NotData, RuntimeError, SyntaxError, TypeError, ValueError),
)
NUMPY = {"np": "numpy", "numpy": "numpy"}


class Unusable(Exception):
    """The test needs something that cannot be sent, so no program could pass the test."""


class Stopped(BaseException):
    """The test cannot continue without answers. No `except Exception` of a test catches a BaseException."""


# --- the program's side --------------------------------------------------------------------------------------


def answer(program: str, operations: list[Operation], out: TextIO) -> None:
    """Run the program and the operations; write a line of JSON for each, and a last line "done"."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(program, "program", "exec"), module.__dict__)
    values: list[object] = []
    for operation in operations:
        try:
            arguments = [decode(argument, values.__getitem__) for argument in as_list(operation.get("arguments"))]
            before = [_encode_or_none(argument) for argument in arguments]
            value = _run_operation(operation, arguments, module.__dict__, values)
            line: dict[str, Data] = _encode_value(value)
            if value is None:
                changed = [_encode_or_none(argument) for argument in arguments]
                line["changed"] = [None if old == new else new for old, new in zip(before, changed, strict=True)]
        # The program, and its values when inspected, may raise any exception.
        except Exception as error:
            value, line = None, _encode_error(error)
        values.append(value)
        _write_line(out, line)
    _write_line(out, "done")


def _run_operation(
    operation: Operation, arguments: list[object], names: Mapping[str, object], values: list[object]
) -> object:
    name = str(operation.get("name"))
    if operation["do"] == "name":
        if name not in names:
            raise NameError(f"name {name!r} is not defined")
        return names[name]
    target = decode(operation["of"], values.__getitem__)
    match operation["do"]:
        case "attribute":
            return getattr(target, name)
        case "items":
            return list(itertools.islice(cast(Iterable[object], target), ITEMS))
        case _:
            named = operation["named"]
            assert callable(target) and isinstance(named, dict)
            return target(*arguments, **{key: decode(argument, values.__getitem__) for key, argument in named.items()})


def _encode_or_none(value: object) -> Data:
    try:
        return encode(value, data_alone)
    except NotData:
        return None


def _encode_value(value: object) -> dict[str, Data]:
    try:
        return {"value": encode(value, data_alone)}
    except NotData:
        return {"object": type(value).__name__}


def _encode_error(error: Exception) -> dict[str, Data]:
    known = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    return {"raised": known.__name__, "text": str(error)[:QUOTED], "arguments": _encode_or_none(list(error.args))}


# --- the checker's side --------------------------------------------------------------------------------------


class Trace:
    """The operations of one test. The first operations have answers; stand-ins replace the other answers."""

    def __init__(self, operations: list[Operation], answers: list[dict[str, Data]]) -> None:
        self._known = list(zip(operations, answers, strict=False))
        self.operations: list[Operation] = []
        self.guesses = False
        self.certain = 0
        """Number of operations at the beginning whose answers are known."""
        self.exceptions = Exceptions()

    def ask(self, operation: Operation, arguments: tuple[object, ...] = ()) -> object:
        """Return the operation's value. Raises the program's exception."""
        place = len(self.operations)
        if place >= OPERATIONS:
            raise Stopped
        self.operations.append(operation)
        if self.guesses or place >= len(self._known) or self._known[place][0] != operation:
            self.guesses = True
            return RemoteObject(self, place)
        self.certain += 1
        reply = self._known[place][1]
        # The program may have forged this line.
        try:
            value = _value_of(reply, arguments)
        except UNREADABLE as error:
            raise self.refusal(f"the program's answer is not data: {type(error).__name__}") from None
        if value is OBJECT:
            return RemoteObject(self, place)
        if not isinstance(value, Exception):
            return value
        # Not recorded, because a test may use `hasattr` to look for attributes that the program's objects lack.
        if operation["do"] == "name" or (operation["do"] == "attribute" and isinstance(value, AttributeError)):
            raise value
        raise self.exceptions.record(value)

    def refusal(self, message: str) -> BaseException:
        """Return an exception that fails the test, even if the test catches the exception."""
        return self.exceptions.record(Refused(message))


def _value_of(answer: dict[str, Data], arguments: tuple[object, ...]) -> object:
    """Return an answer's value, exception or `OBJECT`, and apply its changes to the arguments."""
    if "raised" in answer:
        encoded = answer.get("arguments")
        decoded = None if encoded is None else decode(encoded, data_alone)
        return python_error(
            str(answer["raised"]), str(answer.get("text")), decoded if isinstance(decoded, list) else None
        )
    if "object" in answer:
        return OBJECT
    value = decode(answer["value"], data_alone)
    for argument, new in zip(arguments, as_list(answer.get("changed")), strict=False):
        if new is not None:
            _apply_change(argument, decode(new, data_alone))
    return value


class RemoteObject:
    """An object of the program, or a value that is not known yet. A test can call the object and get its attributes.

    A test that compares an object of the program, or uses its truth value or length, fails with `TypeError`: the
    program could choose the result.
    """

    def __init__(self, trace: Trace, place: int | None) -> None:
        self._trace = trace
        self._place = place

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._trace.ask({"do": "attribute", "of": self.reference(), "name": name})

    def __call__(self, *arguments: object, **named: object) -> object:
        encoded = [encode(argument, _encode_for_program) for argument in arguments]
        by_name = {key: encode(argument, _encode_for_program) for key, argument in named.items()}
        call: Operation = {"do": "call", "of": self.reference(), "arguments": encoded, "named": by_name}
        return self._trace.ask(call, arguments)

    def __iter__(self) -> Iterator[object]:
        if self._trace.guesses:
            return iter(())
        items = self._trace.ask({"do": "items", "of": self.reference()})
        if isinstance(items, RemoteObject) and not self._trace.guesses:
            raise self._trace.refusal("the program's iterator yields objects; tests compare only data")
        return iter(items) if isinstance(items, Iterable) else iter(())

    def reference(self) -> Data:
        if self._place is None:
            raise Stopped
        return {"answer": self._place}

    def stand_in(self, *_: object) -> object:
        if not self._trace.guesses:
            raise self._trace.refusal(
                "an object of the program cannot be compared or computed with; tests compare only data"
            )
        return RemoteObject(self._trace, None)

    def __bool__(self) -> bool:
        self.stand_in()
        return True

    def __len__(self) -> int:
        # `list` asks for a length, and continues without it after a TypeError.
        if not self._trace.guesses:
            raise TypeError("an object of the program has no length in a test; tests compare only data")
        return 0

    __hash__ = None  # pyright: ignore[reportAssignmentType]


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
OPERATORS = ["eq", "ne", "lt", "le", "gt", "ge", "getitem", "contains", "neg", "pos", "abs", "round", "invert", *BINARY]
for _name in (*OPERATORS, *(f"r{operator}" for operator in BINARY)):
    setattr(RemoteObject, f"__{_name}__", RemoteObject.stand_in)


def _encode_for_program(value: object) -> Data:
    if isinstance(value, RemoteObject):
        return value.reference()
    name = getattr(value, "__name__", "")
    if name and getattr(builtins, name, None) is value:
        return {"builtin": name}
    raise Unusable(f"it passes {value!r} to the program, and only data can be sent")


def _apply_change(argument: object, new: object) -> None:
    """Change the argument in the test as the program has changed its copy."""
    match argument, new:
        case (list(), list()) | (bytearray(), bytearray()):
            argument[:] = new
        case (dict(), dict()) | (set(), set()):
            argument.clear()
            argument.update(new)
        case _:
            pass


def verdict(code: str, operations: list[Operation], answers: list[dict[str, Data]]) -> dict[str, Data]:
    """Run one test; return {"passed": true}, {"failed": reason}, {"unusable": reason}, or {"ask": operations}."""
    trace = Trace(operations, answers)
    try:
        tree = ast.parse(code)
        first_time = not operations
        compile(tree, "test", "exec")
    except (SyntaxError, ValueError) as error:
        return {"unusable": f"{type(error).__name__}: {error}"}
    reason = ""
    try:
        names = _stand_ins(tree, trace) | trace.exceptions.names()
        # Without asserts, the first run reaches all operations of a test.
        tree = ast.fix_missing_locations(_Asserts().visit(tree)) if first_time and trace.guesses else tree
        exec(compile(rewrite(tree), "test", "exec"), names)
    except Unusable as error:
        return {"unusable": str(error)}
    except Stopped:
        reason = f"it needs more than {OPERATIONS} calls"
    # A test may raise any exception; `SystemExit` is a failure too.
    except BaseException as error:
        reason = describe(error) + ("" if error.args else line_of(code, error))
    if trace.guesses:
        return {"ask": json.dumps(trace.operations), "certain": trace.certain}
    reason = reason or "".join(f"the program raised {describe(error)}" for error in trace.exceptions.unaccepted[:1])
    return {"failed": reason} if reason else {"passed": True}


def fix_random_numbers(text: str) -> None:
    """Make random numbers and ids the same in each run of `text`: tests and programs run several times."""
    if any(word in text for word in ("random", "uuid", "secrets", "shuffle")):
        import random

        draw = random.Random(text).randbytes
        for module, name in ((os, "urandom"), (random, "_urandom")):
            setattr(module, name, draw)
        random.seed(text)


def run_test(test: dict[str, Data]) -> dict[str, Data]:
    """Run one test of a checker's task, and return its `verdict`."""
    code = str(test["code"])
    fix_random_numbers(code)
    try:
        operations = json.loads(str(test["operations"]))
        answers = [json.loads(str(line)) for line in as_list(test["answers"])]
    # The program may have forged its answers.
    except (ValueError, RecursionError) as error:
        return {"failed": f"the program's answers cannot be read: {type(error).__name__}"}
    return verdict(code, operations, answers)


def _stand_ins(tree: ast.Module, trace: Trace) -> dict[str, object]:
    """Return stand-ins for the program's names in a test.

    A name of a Python builtin means the builtin. But if a test uses no other names and calls exactly one builtin, the
    program's function of that name is tested. Modules of the standard library and numpy are imported in the checker.
    """
    loads = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    based = [n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    free_names = dict.fromkeys(name for name in loads if not hasattr(builtins, name))
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    if not free_names and len(called) == 1:
        free_names = dict.fromkeys(called)
    bound: dict[str, object] = {"__name__": "test"}
    for name in free_names:
        module = NUMPY.get(name, name if name in sys.stdlib_module_names else "")
        try:
            if module and loads.count(name) == based.count(name):
                bound[name] = __import__(module)
            else:
                bound[name] = trace.ask({"do": "name", "name": name})
        except (NameError, ImportError):
            continue
    return bound


class _Asserts(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)


def _run_in_fork(run: Callable[[], dict[str, Data]], timeout_s: float) -> dict[str, Data]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(run()))
        os._exit(0)
    os.close(writer)
    output = b""
    end, poll = time.monotonic() + timeout_s, select.poll()
    poll.register(reader, select.POLLIN)
    while poll.poll(1e3 * max(0.0, end - time.monotonic())):
        more = os.read(reader, 2**16)
        if not more:
            break
        output += more
    else:
        output = json.dumps({"failed": f"its test did not end within {timeout_s:.3g} s"}).encode()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    try:
        return json.loads(output)
    except ValueError:
        return {"failed": "its test ended without a result"}


def _write_line(out: TextIO, line: Data) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def main() -> None:
    """Read the task of checker or program as JSON from stdin; write answers to stdout; discard all other output."""
    task = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if "program" in task:
        fix_random_numbers(task["program"])
        answer(task["program"], json.loads(task["operations"]), out)
        return
    sys.set_int_max_str_digits(0)
    end = time.monotonic() + task["all_timeout_s"]
    for test in task["tests"]:
        left_s = min(task["timeout_s"], max(0.0, end - time.monotonic()))
        _write_line(out, _run_in_fork(lambda test=test: run_test(test), left_s))


if __name__ == "__main__":
    main()
