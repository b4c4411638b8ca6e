"""The default sandbox: Linux namespaces made by bubblewrap (https://github.com/containers/bubblewrap).

A program has its own users, processes, network (without an interface), shared memory and files. A program can read /usr
and our Python with its packages. /tmp and /dev/shm are writable, empty and small, and are deleted when the program has
ended. The program sees no home folder, no folder of a run, and no other processes.
"""

import asyncio
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamppo.errors import TaskError
from streamppo.tasks.scorers import capture
from streamppo.tasks.scorers.capture import Ran, RunLimits

NOBODY = "65534"
LAUNCHER = capture.LAUNCHER.read_text()
MIN_VERSION = (0, 8, 0)
"""The first version of bubblewrap that can bound a tmpfs and forbid nested user namespaces."""
KERNEL = (
    "probably the machine or its container allows no user namespaces (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns; for containers see docs/security.md)"
)
ALTERNATIVE = (
    'Otherwise name another sandbox, `arguments = { sandbox = "..." }`: a remote service (docs/security.md), or '
    '"streamppo.tasks.scorers.sandbox:Local", which does not protect the machine.'
)


class Bubblewrap:
    """A sandbox with `disk_mib` for files in each of /tmp and /dev/shm. Raises `TaskError` if bwrap does not work."""

    def __init__(self, disk_mib: int = 64) -> None:
        if missing := problem():
            raise TaskError(missing)
        self._disk_bytes = disk_mib * 2**20

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ran:
        env = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        return await asyncio.to_thread(run, program, stdin, limits, disk_bytes=self._disk_bytes, env=env)


def run(
    program: str,
    stdin: str,
    limits: RunLimits,
    *,
    disk_bytes: int,
    env: Mapping[str, str],
    files: Sequence[str] = (),
    inherits: tuple[int, ...] = (),
    address_mib: int | None = None,
) -> Ran:
    """Run a program as `Sandbox.run` does, with access to `files` and the descriptors `inherits`."""
    # bubblewrap copies the program into the sandbox from an unlinked file.
    with tempfile.TemporaryFile() as source, capture.StartSignal() as started:
        source.write(program.encode(errors="replace"))
        source.seek(0)
        file = ["--perms", "0644", "--ro-bind-data", str(source.fileno()), "/tmp/program.py"]
        limit_arguments = started.arguments(limits._replace(memory_mib=address_mib or limits.memory_mib))
        launcher = ["-sP", "-c", LAUNCHER, "walled", "0", *limit_arguments]
        command = [*_sandbox_command(disk_bytes, files), *file, "--remount-ro", "/", "--", sys.executable, *launcher]
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", **env}
        descriptors = (source.fileno(), *inherits)
        return capture.run(command, stdin, limits, started, env=environment, folder="/", files=descriptors)


@functools.cache
def problem(alternative: str = ALTERNATIVE) -> str:
    """Return why bubblewrap does not work here, with the remedy and `alternative`; "" if bubblewrap works."""
    path = shutil.which("bwrap")
    if path is None:
        install = "`apt-get install bubblewrap` or `dnf install bubblewrap` installs it"
        return f"programs of the policy run in bubblewrap, and there is no `bwrap` here: {install}. {alternative}"
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if tuple(map(int, re.findall(r"\d+", version))) < MIN_VERSION:
        minimum = ".".join(map(str, MIN_VERSION))
        return f"programs of the policy run in bubblewrap {minimum} or newer; this is {version}. {alternative}"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return f"root needs `setpriv` (package util-linux) to run programs of the policy as nobody. {alternative}"
    command = [*_sandbox_command(2**20), "--", sys.executable, "-I", "-c", ""]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env={"PATH": "/usr/bin:/bin"})
    if ran.returncode:
        return f"bubblewrap does not work here: {ran.stderr.strip()[-300:]!r}; {KERNEL}. {alternative}"
    return ""


def _sandbox_command(disk_bytes: int, files: Sequence[str] = ()) -> list[str]:
    """Return the part of the bubblewrap command that all programs share; `files` keep their paths in the sandbox."""
    bwrap = shutil.which("bwrap") or "bwrap"
    unshared = ["user", "ipc", "pid", "net", "uts", "cgroup-try"]
    size = ["--size", str(disk_bytes)]
    return [
        *_as_nobody(bwrap, files),
        bwrap,
        *(f"--unshare-{namespace}" for namespace in unshared),
        *("--disable-userns", "--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox", "--cap-drop", "ALL"),
        *("--die-with-parent", "--new-session"),
        *("--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *(*size, "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *_system_mounts(files),
    ]


def _as_nobody(bwrap: str, files: Sequence[str]) -> list[str]:
    """Return the command prefix that drops root's rights, because the kernel does not limit root's processes.

    The user nobody cannot read a Python in root's home. So an outer bubblewrap, started as root, mounts this Python in
    readable folders.
    """
    if os.geteuid() != 0:
        return []
    # The inner bubblewrap mounts the program's files in /tmp.
    places = ["--bind", "/proc", "/proc", "--dev", "/dev", "--perms", "0755", "--dir", "/tmp"]
    outer = [bwrap, *_system_mounts(files), *places, "--die-with-parent"]
    setpriv = shutil.which("setpriv") or "setpriv"
    return [*outer, "--", setpriv, "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]


def _system_mounts(files: Sequence[str]) -> list[str]:
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            mounts += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            mounts += ["--ro-bind", str(path), str(path)]
    paths = [f"/etc/{name}" for name in ("ld.so.cache", "alternatives")]
    paths += [path for path in python_files() if not Path(path).is_relative_to("/usr")]
    paths += files
    # bubblewrap itself would make parent folders that the user nobody cannot read.
    parents = dict.fromkeys(str(parent) for path in paths for parent in [*Path(path).parents][-2::-1])
    mounts += [word for parent in parents for word in ("--perms", "0755", "--dir", parent)]
    return [*mounts, *(word for path in paths for word in ("--ro-bind-try", path, path))]


def python_files() -> list[str]:
    """Return the files and folders of the Python that runs us."""
    prefixes = dict.fromkeys((sys.base_prefix, sys.prefix, os.path.realpath(sys.base_prefix)))
    return [f"{prefix}/{name}" for prefix in prefixes for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
