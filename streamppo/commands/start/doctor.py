"""`streamppo doctor`: checks the installation and the machine, without configuration and Ray, and names remedies."""

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

from streamppo.commands.checks.finding import Finding, Findings, first_line, print_findings
from streamppo.commands.checks.machine import gpus_here
from streamppo.driver import run_folder
from streamppo.errors import RunError
from streamppo.telemetry import host

PACKAGE = "streamppo"
SHARED = Path("/dev/shm")
OPEN_FILES = 4096
SHARED_MIB, FREE_MIB, MEMORY_MIB = 512, 1024, 4096
"""Shared memory, disk and memory that a small run needs."""
SKEW_S = 2.0


def doctor(runs: Path) -> int:
    """Print all findings. `runs` is the folder for runs. Returns the exit code, 1 if there is an error."""
    findings = [*packages(), *machine(), *places(runs)]
    print_findings(findings)
    return int(any(finding.state == "error" for finding in findings))


def packages() -> Findings:
    """Check Python, and the packages that streamppo and its extras require by its metadata."""
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.platform()}")
    requirements = [Requirement(requirement) for requirement in metadata.requires(PACKAGE) or []]
    required = [requirement for requirement in requirements if _is_for(requirement, "")]
    lacking = [requirement for requirement in required if _lack(requirement)]
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "ray", "transformers"))
    yield Finding("packages", "ok", f"{len(required) - len(lacking)} of {len(required)} are there: {versions}")
    for requirement in lacking:
        remedy = f"pip install -c constraints.txt '{requirement}'"
        yield Finding(requirement.name, "error", f"{_lack(requirement)}: {remedy}")
    for name in metadata.metadata(PACKAGE).get_all("Provides-Extra") or []:
        others = [requirement for requirement in requirements if requirement not in required]
        yield _extra(name, [requirement for requirement in others if _is_for(requirement, name)])


def _is_for(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _extra(name: str, requirements: list[Requirement]) -> Finding:
    if lacks := [_lack(requirement) for requirement in requirements if _lack(requirement)]:
        return Finding(f"extra {name}", "note", f"{'; '.join(lacks)}: pip install '{PACKAGE}[{name}]'")
    # Several extras of an extra may require the same package.
    names = dict.fromkeys(requirement.name for requirement in requirements)
    return Finding(f"extra {name}", "ok", ", ".join(f"{package} {_version(package)}" for package in names))


def _lack(requirement: Requirement) -> str:
    version = _version(requirement.name)
    if not version:
        return f"{requirement.name} is not installed"
    # Local builds, such as 2.13.0+cpu, and release candidates are suitable too.
    is_suitable = requirement.specifier.contains(version, prereleases=True)
    return "" if is_suitable else f"{requirement.name} {version} is not {requirement.specifier}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def machine() -> Findings:
    """Check cores, memory, GPUs, and limits that would stop Ray."""
    yield _enough("memory", host.total_mib(), MEMORY_MIB, f"and {host.cores()} cores", "take a larger machine")
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
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        yield Finding("ports", "ok", f"a process can listen on 127.0.0.1, as at port {port}")
    except OSError as error:
        yield Finding("ports", "error", f"no process can listen on 127.0.0.1, which Ray needs: {first_line(error)}")


def _enough(subject: str, mib: int, least: int, more: str, remedy: str) -> Finding:
    short = f"; {least:,} MiB are needed: {remedy}" if mib < least else ""
    return Finding(subject, "note" if short else "ok", f"{mib:,} MiB {more}{short}")


def places(runs: Path) -> Findings:
    """Check that the disk for runs is local and writable, has space, and has the same time as this machine."""
    folder = next(folder for folder in (runs.resolve(), *runs.resolve().parents) if folder.exists())
    if not folder.is_dir():
        yield Finding("runs", "error", f"{folder} is a file; --runs names another folder")
        return
    try:
        run_folder.refuse_place(folder)
    except RunError as error:
        yield Finding("runs", "error", str(error))
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            before = time.time()
            file.write(b".")
            file.flush()
            skew = abs(os.stat(file.name).st_mtime - before)
    except OSError as error:
        yield Finding("runs", "error", f"{folder} cannot be written: {first_line(error)}; --runs names another folder")
        return
    free = shutil.disk_usage(folder).free // 2**20
    yield _enough("runs", free, FREE_MIB, f"free at {folder}", "--runs names a folder of another disk")
    if skew > SKEW_S:
        text = f"{folder} gives files a time that is {skew:.0f} s off: set the clocks of both machines (NTP)"
        yield Finding("clock", "note", text)
