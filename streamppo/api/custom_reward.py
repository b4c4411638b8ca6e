"""Turns a function or class of a script or notebook into a value of `reward.function`.

reward of a module                              `package.module:name` or `path/file.py:name`
reward defined in the script or notebook        a file with its source, after the definitions that it uses:
    modules, and members of modules                 as imports
    functions and classes                           their source, after the definitions that they use
    numbers, texts, tables, regular expressions     their present values

Reward processes, resume and replay can load the value without the script. Lambdas, methods, closures, and rewards that
use values of other types are refused.
"""

import __future__

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, MethodType, ModuleType
from typing import Never

from streamppo.api.messages import RewardSource
from streamppo.errors import TaskError

MAIN = "__main__"
LAZY = "from __future__ import annotations\n"
HEAD = '"""The reward of this run, from the script or notebook that started it."""\n'
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write_out(reward: Callable[..., object]) -> RewardSource:
    """Return the name of `reward`, and its source if the script has it. Raises `TaskError` if the source needs more."""
    name = _name(reward)
    if name == "<lambda>":
        raise TaskError("reward: a lambda has no source that can stand alone: write it as a `def`")
    if not name.isidentifier():
        raise TaskError(
            f"reward: {type(reward).__name__} is neither a function nor a class: give the class, and its arguments as "
            "reward.arguments"
        )
    module = sys.modules.get(getattr(reward, "__module__", ""))
    if module is not None and module.__name__ != MAIN and getattr(module, name, None) is reward:
        return RewardSource(function=f"{_module_name(module)}:{name}")
    if isinstance(reward, MethodType | classmethod):
        raise TaskError(f"reward: {name!r} is a method: give a class with a `__call__`, or a function that calls it")
    file = _File(name)
    file.define(reward)
    return RewardSource(function=name, source=file.text())


def _module_name(module: ModuleType) -> str:
    """Return the name of a module in a package, or the absolute path of any other module's file."""
    file = getattr(module, "__file__", None)
    return module.__name__ if module.__package__ or not file or not file.endswith(".py") else str(Path(file).resolve())


class _File:
    """Builds the file of a reward: imports first, then each definition after the definitions that it uses."""

    def __init__(self, reward: str) -> None:
        self._reward = reward
        self._is_lazy = False
        self._imports: set[str] = set()
        self._body: list[str] = []
        self._defined: dict[str, object] = {}

    def text(self) -> str:
        lazy = [LAZY] if self._is_lazy else []
        imports = "".join(f"{statement}\n" for statement in sorted(self._imports))
        return "\n".join([HEAD, *lazy, *([imports] if imports else []), *self._body])

    def define(self, definition: object) -> None:
        """Add a function or class of the script, after the definitions that it uses."""
        self._defined[_name(definition)] = definition
        codes = list(_codes(definition))
        if closed := {name for code in codes for name in code.co_freevars} - {"__class__"}:
            self._refuse(f"{_name(definition)!r} is a closure over {min(closed)!r}")
        # With `from __future__ import annotations`, names in annotations are not evaluated, so they need not exist.
        is_lazy = any(code.co_flags & __future__.annotations.compiler_flag for code in codes)
        self._is_lazy |= is_lazy
        text = self._source(definition, codes)
        values = _values(definition)
        for name in sorted(_names(f"{LAZY}{text}" if is_lazy else text) - {_name(definition)}):
            self._use(name, values, text)
        self._body.append(f"\n{text}")

    def _use(self, name: str, values: Mapping[str, object], text: str) -> None:
        """Add a definition, value or import of the global `name` to the file. `values` are the script's globals."""
        if name not in values:
            if not hasattr(builtins, name):
                self._refuse(f"{name!r} is not defined")
            return
        value = values[name]
        if name in self._defined:
            return
        self._defined[name] = value
        module = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            self._import(name, value, text)
        elif module == MAIN and hasattr(value, "__qualname__"):
            self._define_as(name, value)
        elif isinstance(value, re.Pattern):
            self._imports.add("import re")
            self._body.append(f"{name} = re.compile({value.pattern!r}, {value.flags})\n")
        elif (literal := _literal(value)) is not None:
            self._body.append(f"{name} = {literal}\n")
        elif statement := _import_statement(value, name):
            self._imports.add(statement)
        else:
            kind = value.__name__ if isinstance(value, type) else f"{type(value).__name__}"
            self._refuse(f"it uses {name!r}, a {kind} that only the script has")

    def _import(self, name: str, module: ModuleType, text: str) -> None:
        alias = "" if module.__name__ == name else f" as {name}"
        self._imports.add(f"import {module.__name__}{alias}")
        # `import a.b` binds only `a`, so every submodule in use is imported.
        for submodule in sorted(_submodules(name, module, text)):
            self._imports.add(f"import {submodule}")

    def _define_as(self, name: str, value: object) -> None:
        defined_name = getattr(value, "__name__", name)
        if self._defined.get(defined_name, value) is not value:
            self._refuse(f"two of its functions are called {defined_name!r}")
        if defined_name == name or defined_name not in self._defined:
            self.define(value)
        if defined_name != name:
            self._body.append(f"{name} = {defined_name}\n")

    def _source(self, definition: object, codes: Sequence[CodeType]) -> str:
        """Return the source of a definition, with its decorators, from the script or the notebook's cell."""
        name = _name(definition)
        file = codes[0].co_filename if codes else str(getattr(sys.modules[MAIN], "__file__", "the script"))
        lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            tree = ast.parse("")
        for node in ast.walk(tree):
            if isinstance(node, Definition) and node.name == name and _defines(node, definition, codes):
                text = "".join(lines[_first_line(node) - 1 : node.end_lineno]).rstrip() + "\n"
                # Indented lines follow `if True:`, because dedenting would change strings of several lines.
                return f"if True:\n{text}" if text[0].isspace() else text
        self._refuse(f"the source of {_name(definition)!r} is no longer in {file}")

    def _refuse(self, reason: str) -> Never:
        raise TaskError(
            f"reward {self._reward!r} cannot stand alone in a file: {reason}; write it to a file, and name it: "
            f'"reward.function=path/file.py:{self._reward}"'
        )


def _codes(definition: object) -> Iterator[CodeType]:
    """Yield the code object of a function below its decorators, or of each method in the source of a class."""
    for member in vars(definition).values() if isinstance(definition, type) else [definition]:
        function = getattr(member, "__func__", getattr(member, "fget", None) or member)
        inner = inspect.unwrap(function) if callable(function) else None
        code = getattr(inner, "__code__", None)
        # Methods that a decorator such as dataclass generates have no source in the script.
        in_script = getattr(inner, "__module__", "") == MAIN and bool(code and linecache.getlines(code.co_filename))
        if isinstance(code, CodeType) and (in_script or member is definition):
            yield code


def _values(definition: object) -> Mapping[str, object]:
    """Return the globals of the module that defines a function or class."""
    inner = inspect.unwrap(definition) if callable(definition) and not isinstance(definition, type) else definition
    return getattr(inner, "__globals__", vars(sys.modules[MAIN]))


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _defines(node: Definition, definition: object, codes: Sequence[CodeType]) -> bool:
    """Return True if `node` has the line numbers of `definition`. Other definitions may have the same name."""
    if isinstance(node, ast.ClassDef):
        return isinstance(definition, type) and all(
            _first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0) for code in codes
        )
    return not isinstance(definition, type) and any(_first_line(node) == code.co_firstlineno for code in codes)


def _names(text: str) -> set[str]:
    top = symtable.symtable(text, "reward", "exec")
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    tables = list(top.get_children())
    for table in tables:
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        tables += table.get_children()
    return names


def _submodules(name: str, module: ModuleType, text: str) -> set[str]:
    """Return the submodules that `text` uses through the module `name`. Example: a.b in `a.b.c(x)`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        submodule = f"{module.__name__}{dotted.removeprefix(name)}"
        if dotted.startswith(f"{name}.") and isinstance(sys.modules.get(submodule), ModuleType):
            names.add(submodule)
    return names


def _literal(value: object) -> str | None:
    """Return the Python literal of a number, string, list or dict; None for other values."""
    try:
        text = repr(value)
        parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError):
        return None
    return text if type(parsed) is type(value) and parsed == value else None


def _import_statement(value: object, name: str) -> str | None:
    """Return a statement that imports `value` as `name` from the module that has it; None if no module has it."""
    for module_name in (getattr(value, "__module__", None), getattr(type(value), "__module__", None)):
        module = sys.modules.get(module_name) if isinstance(module_name, str) and module_name != MAIN else None
        for member in (getattr(value, "__name__", name), name):
            if module is not None and getattr(module, member, None) is value:
                return f"from {module.__name__} import {member}" + ("" if member == name else f" as {name}")
    return None


def _name(definition: object) -> str:
    return getattr(definition, "__name__", "")
