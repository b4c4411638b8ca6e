"""Turns a reward given in Python into a value of `reward.function`: by its module, or as a standalone file.

imported from a module                      by name, as `package.module:name` or `path/file.py:name`
defined in the script or notebook           its source in a file, after all that it uses there:
    modules, and members of modules             as imports
    functions and classes                       their source, and all that they use
    numbers, texts, tables, regular expressions their present values

Reward processes, resume and replay then load it without the script. Anything else is refused.
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
HEAD = '"""The reward of this run, as the script or notebook had it that started it."""\n'
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write_out(reward: Callable[..., object]) -> RewardSource:
    """Return the name of `reward`, or its source too. Raises `TaskError` if the source would not work in a file."""
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
        return RewardSource(function=f"{_place(module)}:{name}")
    if isinstance(reward, MethodType | classmethod):
        raise TaskError(f"reward: {name!r} is a method: give a class with a `__call__`, or a function that calls it")
    file = _File(name)
    file.define(reward)
    return RewardSource(function=name, source=file.text())


def _place(module: ModuleType) -> str:
    """The name of a module in a package; the absolute path of any other module's file."""
    file = getattr(module, "__file__", None)
    return module.__name__ if module.__package__ or not file or not file.endswith(".py") else str(Path(file).resolve())


class _File:
    """The file of a reward: imports first, then each definition after the definitions that it uses."""

    def __init__(self, reward: str) -> None:
        self._reward = reward
        self._is_lazy = False
        self._imports: set[str] = set()
        self._body: list[str] = []
        self._known: dict[str, object] = {}

    def text(self) -> str:
        """The text of the file."""
        lazy = [LAZY] if self._is_lazy else []
        imports = "".join(f"{one}\n" for one in sorted(self._imports))
        return "\n".join([HEAD, *lazy, *([imports] if imports else []), *self._body])

    def define(self, definition: object) -> None:
        """Add a function or class of the script, after all that it uses."""
        self._known[_name(definition)] = definition
        codes = list(_codes(definition))
        if closed := {name for one in codes for name in one.co_freevars} - {"__class__"}:
            self._refuse(f"{_name(definition)!r} is a closure over {min(closed)!r}")
        # With lazy annotations, names in them are never evaluated and need not exist.
        is_lazy = any(one.co_flags & __future__.annotations.compiler_flag for one in codes)
        self._is_lazy |= is_lazy
        text = self._source(definition, codes)
        values = _values(definition)
        for name in sorted(_names(f"{LAZY}{text}" if is_lazy else text) - {_name(definition)}):
            self._use(name, values, text)
        self._body.append(f"\n{text}")

    def _use(self, name: str, values: Mapping[str, object], text: str) -> None:
        """Give `name` the same meaning in the file as in the script."""
        if name not in values:
            if not hasattr(builtins, name):
                self._refuse(f"{name!r} is not defined")
            return
        value = values[name]
        if name in self._known:
            return
        self._known[name] = value
        module = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            self._import(name, value, text)
        elif module == MAIN and hasattr(value, "__qualname__"):
            self._define_as(name, value)
        elif isinstance(value, re.Pattern):
            self._imports.add("import re")
            self._body.append(f"{name} = re.compile({value.pattern!r}, {value.flags})\n")
        elif (plain := _plain(value)) is not None:
            self._body.append(f"{name} = {plain}\n")
        elif statement := _importable(value, name):
            self._imports.add(statement)
        else:
            kind = value.__name__ if isinstance(value, type) else f"{type(value).__name__}"
            self._refuse(f"it uses {name!r}, a {kind} that only the script has")

    def _import(self, name: str, module: ModuleType, text: str) -> None:
        alias = "" if module.__name__ == name else f" as {name}"
        self._imports.add(f"import {module.__name__}{alias}")
        # `import a.b` only binds `a`: add an import for every submodule in use.
        for part in sorted(_parts(name, module, text)):
            self._imports.add(f"import {part}")

    def _define_as(self, name: str, value: object) -> None:
        own = getattr(value, "__name__", name)
        if self._known.get(own, value) is not value:
            self._refuse(f"two of its functions are called {own!r}")
        if own == name or own not in self._known:
            self.define(value)
        if own != name:
            self._body.append(f"{name} = {own}\n")

    def _source(self, definition: object, codes: Sequence[CodeType]) -> str:
        """The source of a definition in its file or cell, with its decorators."""
        name = _name(definition)
        file = codes[0].co_filename if codes else str(getattr(sys.modules[MAIN], "__file__", "the script"))
        lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            tree = ast.parse("")
        for node in ast.walk(tree):
            if isinstance(node, Definition) and node.name == name and _is_of(node, definition, codes):
                text = "".join(lines[_first(node) - 1 : node.end_lineno]).rstrip() + "\n"
                # Its lines stay as they are: a text over several lines is a part of them.
                return f"if True:\n{text}" if text[0].isspace() else text
        self._refuse(f"the source of {_name(definition)!r} is no longer in {file}")

    def _refuse(self, why: str) -> Never:
        raise TaskError(
            f"reward {self._reward!r} cannot stand alone in a file: {why}; write it to a file, and name it: "
            f'"reward.function=path/file.py:{self._reward}"'
        )


# --- definitions and their names -----------------------------------------------------------------------------


def _codes(found: object) -> Iterator[CodeType]:
    """The code objects of a function without its decorators, or of the methods that the script defines in a class."""
    for member in vars(found).values() if isinstance(found, type) else [found]:
        plain = getattr(member, "__func__", getattr(member, "fget", None) or member)
        inner = inspect.unwrap(plain) if callable(plain) else None
        code = getattr(inner, "__code__", None)
        # Generated methods of a dataclass or named tuple are not in the script.
        is_own = getattr(inner, "__module__", "") == MAIN and bool(code and linecache.getlines(code.co_filename))
        if isinstance(code, CodeType) and (is_own or member is found):
            yield code


def _values(found: object) -> Mapping[str, object]:
    """The globals of the module in which a function or class was defined."""
    inner = inspect.unwrap(found) if callable(found) and not isinstance(found, type) else found
    return getattr(inner, "__globals__", vars(sys.modules[MAIN]))


def _first(node: Definition) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _is_of(node: Definition, found: object, codes: Sequence[CodeType]) -> bool:
    """True if `node` defines `found`, by line numbers: several definitions may have its name."""
    if isinstance(node, ast.ClassDef):
        return isinstance(found, type) and all(
            _first(node) <= code.co_firstlineno <= (node.end_lineno or 0) for code in codes
        )
    return not isinstance(found, type) and any(_first(node) == code.co_firstlineno for code in codes)


def _names(text: str) -> set[str]:
    """The global names that a definition's source uses."""
    top = symtable.symtable(text, "reward", "exec")
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    for table in _inside(top):
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names


def _inside(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for inner in table.get_children():
        yield inner
        yield from _inside(inner)


def _parts(name: str, module: ModuleType, text: str) -> set[str]:
    """The submodules that `text` uses through the module `name`. Example: a.b in `a.b.c(x)`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        part = f"{module.__name__}{dotted.removeprefix(name)}"
        if dotted.startswith(f"{name}.") and isinstance(sys.modules.get(part), ModuleType):
            found.add(part)
    return found


# --- values --------------------------------------------------------------------------------------------------


def _plain(value: object) -> str | None:
    """The Python literal of a number, a text, or a table of them; None for other values."""
    try:
        text = repr(value)
        same = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError):
        return None
    return text if type(same) is type(value) and same == value else None


def _importable(value: object, name: str) -> str | None:
    """The import statement that binds `value`, a member of another module, to `name`; None if there is none."""
    own = getattr(value, "__name__", name)
    for home in (getattr(value, "__module__", None), getattr(type(value), "__module__", None)):
        module = sys.modules.get(home) if isinstance(home, str) and home != MAIN else None
        for known in (own, name):
            if module is not None and getattr(module, known, None) is value:
                return f"from {module.__name__} import {known}" + ("" if known == name else f" as {name}")
    return None


def _name(found: object) -> str:
    return getattr(found, "__name__", "")
