"""Builds a virtual environment with other versions than those of constraints.txt, and prints its interpreter.

    $(python tests/environments/build.py oldest) -m pytest -n 2 -W default
    $(python tests/environments/build.py newest) -m pytest -n 2 -W default
    $(python tests/environments/build.py sglang) -m pytest -W ignore -m sglang tests/sglang

    oldest          the oldest versions that pyproject.toml allows
    newest          the newest releases at the time when the list was made
    sglang          SGLang on a CPU, with the versions of constraints.txt
    sglang-newest   the newest SGLang on a CPU

An environment lies in $STREAMPPO_ENVIRONMENTS (~/.cache/streamppo without it), under a name made of what it consists
of, and is built once: 2 to 7 GiB, about 70 s with SGLang and three minutes with torch for a GPU, which the oldest and
the newest have. Needs Python 3.11, the version of the lists.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def build(name: str) -> Path:
    """The interpreter of the environment, which has this checkout installed in it. Raises `CalledProcessError`."""
    packages = HERE / f"{name}.txt"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    cache = Path(os.environ.get("STREAMPPO_ENVIRONMENTS", Path.home() / ".cache" / "streamppo"))
    folder = cache / f"{name}-{hashlib.sha256(version.encode() + packages.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True, symlinks=True)
        # Bytecode now: compiled at the first import, SGLang's processes would take a minute to start.
        # The list is its own constraint, in place of one that this machine may have for all others.
        _pip(python, "--no-deps", "--compile", "-r", str(packages), constraint=packages)
        (folder / "complete").touch()
    project = hashlib.sha256(str(REPOSITORY).encode() + (REPOSITORY / "pyproject.toml").read_bytes()).hexdigest()
    mark = folder / "project"
    if not mark.exists() or mark.read_text() != project:
        _pip(python, "--no-deps", "-e", str(REPOSITORY))
        mark.write_text(project)
    return python


def _pip(python: Path, *arguments: str, constraint: Path | None = None) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    environment = os.environ if constraint is None else {**os.environ, "PIP_CONSTRAINT": str(constraint)}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


if __name__ == "__main__":
    names = sorted(path.stem for path in HERE.glob("*.txt"))
    if sys.argv[1:] not in [[name] for name in names]:
        sys.exit(f"usage: python tests/environments/build.py {'|'.join(names)}")
    print(build(sys.argv[1]))
