"""Other people's code by name: `package.module:name` or `path/file.py:name`."""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from streamppo.errors import TaskError


def export_path() -> None:
    """A module that stands beside the user's config is importable here, and in every process that is started."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def load(name: str, what: str) -> Any:
    """The object called `name`; `what` says in errors who asked for it. Raises `TaskError` that says what is wrong."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise TaskError(f"{what} {name!r} is not of the form package.module:name or path/file.py:name")
    try:
        module = _from_file(where) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as error:
        raise TaskError(f"{what} {name!r}: {error}") from error
    except Exception as error:
        raise TaskError(f"{what} {name!r}: importing {where} failed: {error!r}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise TaskError(f"{what} {name!r}: {where} has no {attribute!r}")
    return found


def _from_file(name: str) -> ModuleType:
    """The module at a path; a relative one is looked for where Python looks for modules."""
    for folder in ("", *sys.path):
        path = (Path(folder) / name).resolve()
        if path.is_file():
            break
    else:
        raise FileNotFoundError(f"no file {name} here or on the Python path")
    module_name = f"streamppo_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
