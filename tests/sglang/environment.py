"""Builds the virtual environment in which SGLang runs on a CPU, and prints its interpreter.

    $(python tests/sglang/environment.py) -m pytest -W ignore -m sglang tests/sglang

It lies in $STREAMPPO_SGLANG_ENV (~/.cache/streamppo without it), under a name made of what it consists of, and is built
once: about 70 s of download, 2.3 GiB. Needs Python 3.11, the version of the pinned list.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"


def build() -> Path:
    """The interpreter of the environment, which has this checkout installed in it. Raises `CalledProcessError`."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    inputs = version.encode() + REQUIREMENTS.read_bytes()
    cache = Path(os.environ.get("STREAMPPO_SGLANG_ENV", Path.home() / ".cache" / "streamppo"))
    folder = cache / f"sglang-{hashlib.sha256(inputs).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        # Bytecode now: compiled at the first import, SGLang's processes would take a minute to start.
        _pip(python, "--no-deps", "--compile", "-r", str(REQUIREMENTS))
        (folder / "complete").touch()
    project = hashlib.sha256(str(REPOSITORY).encode() + (REPOSITORY / "pyproject.toml").read_bytes()).hexdigest()
    mark = folder / "project"
    if not mark.exists() or mark.read_text() != project:
        _pip(python, "--no-deps", "-e", str(REPOSITORY))
        mark.write_text(project)
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    print(build())
