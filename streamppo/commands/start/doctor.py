"""`streamppo doctor`: what is installed and what this machine has, each with its remedy. No configuration, no Ray.

ok         as a run needs it
note       works, and something is not there or is little: a feature lacks it
error      no run can be made here
"""

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from streamppo.commands.checks.check import print_table
from streamppo.commands.checks.finding import Finding, Findings, first_line
from streamppo.commands.checks.machine import gpus_here, memory_mib
from streamppo.driver.folder import disk
from streamppo.errors import RunError

PACKAGE = "streamppo"
SHARED = Path("/dev/shm")
"""Ray keeps batches and weights here while they are on their way."""
OPEN_FILES = 4096
SHARED_MIB, FREE_MIB, MEMORY_MIB = 512, 1024, 4096
"""Below these a small run gets into difficulties: shared memory, disk, memory."""
SKEW_S = 2.0


def doctor(runs: Path) -> int:
    """Print all findings; `runs` is the folder of the runs to be. The exit code is 1 if there is an error."""
    findings = [*packages(), *machine(), *places(runs)]
    print_table(findings)
    return int(any(one.state == "error" for one in findings))


# --- what is installed ---------------------------------------------------------------------------------------


def packages() -> Findings:
    """Python, every package that streamppo needs, and those of each extra, as its own metadata names them."""
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.platform()}")
    found = [Requirement(one) for one in metadata.requires(PACKAGE) or []]
    needed = [one for one in found if _is_for(one, "")]
    yield from _package_lines(needed)
    for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or []:
        yield _extra(name, [one for one in found if one not in needed and _is_for(one, name)])


def _is_for(one: Requirement, extra: str) -> bool:
    """True for a package that this machine needs with `extra`; the extra "" is none."""
    return one.marker is None or one.marker.evaluate({"extra": extra})


def _package_lines(found: list[Requirement]) -> Findings:
    """One line for all packages that are there, and one for each that is not."""
    lacking = [one for one in found if _lack(one)]
    told = ("torch", "ray", "transformers")
    versions = ", ".join(f"{name} {_version(name)}" for name in told)
    yield Finding("packages", "ok", f"{len(found) - len(lacking)} of {len(found)} are there: {versions}")
    for one in lacking:
        yield Finding(one.name, "error", f"{_lack(one)}: pip install -c constraints.txt '{one}'")


def _extra(name: str, found: list[Requirement]) -> Finding:
    if lacks := [_lack(one) for one in found if _lack(one)]:
        return Finding(f"extra {name}", "note", f"{'; '.join(lacks)}: pip install '{PACKAGE}[{name}]'")
    return Finding(f"extra {name}", "ok", ", ".join(f"{one.name} {_version(one.name)}" for one in found))


def _lack(one: Requirement) -> str:
    """Say that a package is not there or too old; "" if it is as it should be."""
    version = _version(one.name)
    if not version:
        return f"{one.name} is not installed"
    # A build of our own, such as 2.13.0+cpu, and a first candidate of a release count too.
    return "" if one.specifier.contains(version, prereleases=True) else f"{one.name} {version} is not {one.specifier}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


# --- what the machine has ------------------------------------------------------------------------------------


def machine() -> Findings:
    """Cores, memory, GPUs, and the limits that Ray runs into."""
    yield _enough(
        "memory", memory_mib(), MEMORY_MIB, f"and {len(os.sched_getaffinity(0))} cores", "take a larger machine"
    )
    gpus = gpus_here()
    text = f"{gpus} are seen" if gpus else "none: the embedded engine and the learner run on CPUs"
    yield Finding("GPUs", "ok", text)
    if SHARED.is_dir():
        free = shutil.disk_usage(SHARED).free // 2**20
        yield _enough(f"{SHARED}", free, SHARED_MIB, "free", "in a container: --shm-size=2g")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES
    remedy = f", and Ray opens more on many cores: ulimit -n {min(65536, hard) if hard > 0 else 65536}" if few else ""
    yield Finding("open files", "note" if few else "ok", f"up to {soft}{remedy}")
    yield _loopback()


def _enough(subject: str, mib: int, least: int, more: str, remedy: str) -> Finding:
    short = f"; {least:,} MiB are wanted: {remedy}" if mib < least else ""
    return Finding(subject, "note" if short else "ok", f"{mib:,} MiB {more}{short}")


def _loopback() -> Finding:
    """A run of this machine alone speaks over loopback, on ports that the system chooses."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as here:
            return Finding("ports", "ok", f"127.0.0.1 can be listened at, as at {here.getsockname()[1]}")
    except OSError as error:
        return Finding("ports", "error", f"127.0.0.1 cannot be listened at, which Ray must: {first_line(error)}")


# --- the folder of the runs ----------------------------------------------------------------------------------


def places(runs: Path) -> Findings:
    """The disk on which runs would be: of this machine, writable, with room, and with this machine's time."""
    folder = next(one for one in (runs.resolve(), *runs.resolve().parents) if one.is_dir())
    try:
        disk.refuse_network(folder)
    except RunError as error:
        yield Finding("runs", "error", str(error))
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            before = time.time()
            file.write(b".")
            file.flush()
            skew = abs(os.stat(file.name).st_mtime - before)
    except OSError as error:
        yield Finding("runs", "error", f"{folder} takes no file: {first_line(error)}; --runs names another folder")
        return
    free = shutil.disk_usage(folder).free // 2**20
    yield _enough("runs", free, FREE_MIB, f"free at {folder}", "--runs names a folder of another disk")
    if skew > SKEW_S:
        text = f"{folder} gives files a time that is {skew:.0f} s off: set the clocks of both machines (NTP)"
        yield Finding("clock", "note", text)
