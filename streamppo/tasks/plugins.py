"""Loads user code by name: `package.module:name` or `path/file.py:name`."""

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TypeVar, TypeVarTuple
from urllib.parse import quote, unquote

from packaging.requirements import Requirement

from streamppo.errors import RunError, TaskError
from streamppo.tasks import user_traceback

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")
PACKAGE = "streamppo"
EXTRA = re.compile(r"extra == [\"']([^\"']+)")
DEVELOPMENT = {"test", "docs", "frameworks", "peers"}
"""Extras for development, which no run needs."""


def export_path() -> None:
    """Put the current folder first on the import path. Raises `RunError` if a file there hides a library."""
    folder = os.getcwd()
    if shadowing := _shadowing_modules(Path(folder)):
        raise RunError(
            f"{shadowing[0]} hides the module {shadowing[0].stem!r} of Python or of a library, which streamppo and "
            "Ray import: rename it, or start in another folder"
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that can import the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _shadowing_modules(folder: Path) -> list[Path]:
    modules = [*folder.glob("*.py"), *(init.parent for init in folder.glob("*/__init__.py"))]
    return sorted(path for path in modules if _is_of_library(path.stem) and "site-packages" not in path.parts)


def _is_of_library(name: str) -> bool:
    # `streamppo` is not reserved: the folder may be a checkout while an installed streamppo is in use.
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_installed = name != PACKAGE and "site-packages" in Path(file).parts
    return is_installed or name in sys.stdlib_module_names


def load(name: str, subject: str) -> object:
    """Import the object `name`. Raises `TaskError`, with a message that begins with `subject`, if the import fails."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise TaskError(f"{subject} {name!r} is not of the form package.module:name or path/file.py:name")
    try:
        module = _from_file(where) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as error:
        raise TaskError(f"{subject} {name!r}: {error}") from error
    except BaseException as error:
        if not user_traceback.is_of_user(error):
            raise
        raise TaskError(
            f"{subject} {name!r}: importing {where} failed: {user_traceback.format_user_error(error)}"
            f"{_path_hint(where, attribute, error) or remedy(error)}"
        ) from error
    plugin = getattr(module, attribute, None)
    if plugin is None:
        raise TaskError(f"{subject} {name!r}: {where} has no {attribute!r}")
    return plugin


def function(name: str, subject: str) -> Callable[..., object]:
    """Import the function `name`, as `load` does. Raises `TaskError` if the object is not callable."""
    plugin = load(name, subject)
    if not callable(plugin):
        raise TaskError(f"{subject} {name!r} is not a function")
    return plugin


def is_ours(plugin: object) -> bool:
    """Return True for code of streamppo, and False for that of a user's file or module."""
    module = getattr(plugin, "__module__", "")
    return module.startswith(f"{PACKAGE}.") and not module.startswith(f"{__name__}.")


def call(subject: str, function: Callable[[*Arguments], R], *arguments: *Arguments) -> R:
    """Call user code. Raises its own `TaskError`, or one that begins with `subject` and names the line."""
    try:
        return function(*arguments)
    except TaskError:
        raise
    except BaseException as error:
        if not user_traceback.is_of_user(error):
            raise
        raise TaskError(f"{subject}: {user_traceback.format_user_error(error)}{remedy(error)}") from error


def _path_hint(where: str, attribute: str, error: BaseException) -> str:
    """Return the remedy if the file `where` failed to import a module in its folder; "" for other errors."""
    if not where.endswith(".py") or not isinstance(error, ImportError):
        return ""
    path = Path(where).absolute()
    folder = path.parent
    # A relative import is searched below this module.
    if error.name and f"{error.name}.".startswith(f"{__name__}."):
        names = [folder.name, path.stem]
        while (folder / "__init__.py").is_file() and (folder.parent / "__init__.py").is_file():
            folder = folder.parent
            names.insert(0, folder.name)
        return f": name it as a module, {'.'.join(names)}:{attribute}, with PYTHONPATH={folder.parent}"
    if error.name and any((folder / name).exists() for name in (f"{error.name}.py", error.name)):
        return f": it is beside {path.name}, and can be imported with PYTHONPATH={folder}"
    return ""


def remedy(error: BaseException) -> str:
    """Return the command that installs a missing or too old module; "" if no extra of streamppo has the module."""
    if not isinstance(error, ImportError) or not error.name:
        return ""
    # The extras of a checkout that is not installed are unknown.
    with suppress(metadata.PackageNotFoundError):
        if extra := extra_of(error.name.partition(".")[0], metadata.requires(PACKAGE) or ()):
            return f": pip install '{PACKAGE}[{extra}]'"
    return ""


def extra_of(module: str, requirements: Iterable[str]) -> str:
    """Return the extra in `requirements` that installs a module; "" for a module of no extra or of several."""
    extras = set[str]()
    for requirement in map(Requirement, requirements):
        if requirement.name.lower().replace("-", "_") == module.lower():
            extras.update(EXTRA.findall(str(requirement.marker)))
    extras -= DEVELOPMENT
    return min(extras) if len(extras) == 1 else ""


def load_and_try(name: str, field: str, test: Callable[[Callable[..., object]], None]) -> Callable[..., object]:
    """Import a user's function and call `test` on it. Raises `TaskError` if either fails."""
    imported = function(name, field)
    call(f"{field} {name!r}", test, imported)
    return imported


def parameters_of(function: Callable[..., object], subject: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class. Raises `TaskError` without a signature, as in compiled modules."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise TaskError(f"{subject} has no signature to read: call it in a function of your own (`def`)") from error


def check_arguments(factory: Callable[..., object], arguments: Mapping[str, object], subject: str) -> None:
    """Raise `TaskError`, which begins with `subject`, for an unknown or missing argument of a class's constructor."""
    parameters = parameters_of(factory, subject).values()
    named = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    check_names(arguments, named, subject, takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters))
    missing = {p.name for p in parameters if p.name in named and p.default is p.empty} - arguments.keys()
    if missing:
        raise TaskError(f"{subject} needs the argument {min(missing)!r}")


def check_names(arguments: Iterable[str], named: Set[str], subject: str, *, takes_all: bool) -> None:
    """Raise `TaskError`, with the most similar name, for an argument in `arguments` that is not in `named`."""
    unknown = set() if takes_all else set(arguments) - named
    if unknown:
        name = min(unknown)
        similar = difflib.get_close_matches(name, named, 1)
        hint = f"; is {similar[0]!r} meant?" if similar else ""
        raise TaskError(f"{subject} has no argument {name!r} (it has {', '.join(sorted(named)) or 'none'}){hint}")


def _from_file(name: str) -> ModuleType:
    """Import the module at a path. A relative path is searched in the current folder and `sys.path`."""
    for folder in ("", *sys.path):
        path = (Path(folder) / name).resolve()
        if path.is_file():
            break
    else:
        raise FileNotFoundError(f"no file {name} here or on the Python path")
    # The path is the module's name below this module, so processes that Python spawns can import the file too.
    return importlib.import_module(f"{__name__}.{quote(str(path), safe='').replace('.', '%2E')}")


class _FileFinder:
    """Finds the modules that `_from_file` names."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
        folder, _, quoted = name.rpartition(".")
        file = unquote(quoted)
        return spec_from_file_location(name, file) if folder == __name__ and os.path.isabs(file) else None


__path__ = list[str]()
"""Makes the modules of `_FileFinder`, which are below this module, importable."""
sys.meta_path.append(_FileFinder)
