"""`streamppo doctor`: everything missing is named with its remedy, and an error is an exit code of 1."""

import os
import resource
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import MATH

from streamppo import process
from streamppo.cli import main
from streamppo.commands.checks import machine
from streamppo.commands.checks.finding import Finding
from streamppo.commands.start import doctor
from streamppo.config import file as configfile
from streamppo.driver import run_folder
from streamppo.errors import StreamppoError
from streamppo.telemetry import host


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Packages by name, with their versions; without one, it is not there. The requirements are those of this test."""
    versions = {"torch": "2.13.0+cpu", "ray": "2.60.0", "transformers": "5.0", "rich": "14.1rc1", "sglang": "0.5.21"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    needs = ["torch>=2.9", "ray>=2.50", "transformers>=5.0", "rich>=14", "winloop>=1; sys_platform == 'win32'"]
    needs += ["sglang>=0.5.21; extra == 'sglang'", "sglang; extra == 'sglang'", "flash-attn>=2.7; extra == 'flash'"]
    message = {"Provides-Extra": ["sglang", "flash"]}

    class Message:
        def get_all(self, name: str) -> list[str]:
            return message[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: needs)
    monkeypatch.setattr(doctor.metadata, "metadata", lambda _: Message())
    return versions


def by_subject(found: Any) -> dict[str, Finding]:
    return {one.subject: one for one in found}


def test_packages_that_are_there_are_one_line_and_an_extra_that_lacks_one_names_it(installed: dict[str, str]) -> None:
    found = by_subject(doctor.packages())
    assert found.keys() == {"python", "packages", "extra sglang", "extra flash"}
    assert found["packages"] == Finding(
        "packages", "ok", "4 of 4 are there: torch 2.13.0+cpu, ray 2.60.0, transformers 5.0"
    )
    assert found["extra sglang"] == Finding("extra sglang", "ok", "sglang 0.5.21")
    assert found["extra flash"].state == "note"
    assert found["extra flash"].text == "flash-attn is not installed: pip install 'streamppo[flash]'"


def test_a_package_that_is_missing_or_too_old_is_an_error(
    installed: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed["transformers"] = "4.57"
    del installed["ray"]
    found = by_subject(doctor.packages())
    assert found["packages"].text.startswith("2 of 4")
    assert found["ray"].state == found["transformers"].state == "error"
    assert "ray is not installed: pip install" in found["ray"].text
    assert "transformers 4.57 is not >=5.0" in found["transformers"].text
    assert main(["doctor", "--runs", str(tmp_path)]) == StreamppoError.exit_code
    assert "ray is not installed" in capsys.readouterr().out


def test_a_machine_that_has_little_is_told_how_to_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 9999))
    monkeypatch.setattr(doctor, "SHARED_MIB", 2**40)
    found = by_subject(doctor.machine())
    assert found["open files"].state == "note" and found["open files"].text.endswith("ulimit -n 9999")
    assert found["/dev/shm"].state == "note" and "--shm-size" in found["/dev/shm"].text
    assert found["ports"].state == found["memory"].state == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert by_subject(doctor.machine())["open files"].state == "ok"


def test_without_loopback_no_run_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(socket, "create_server", refused)
    ports = by_subject(doctor.machine())["ports"]
    assert ports.state == "error" and "no sockets here" in ports.text


def test_the_folder_of_the_runs_must_take_files_and_be_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [one.state for one in doctor.places(tmp_path / "not" / "yet")] == ["ok"]
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        (error,) = doctor.places(tmp_path / place)
        assert (error.state, error.text) == ("error", f"{tmp_path / 'file'} is a file; --runs names another folder")
    mounts = tmp_path / "mountinfo"
    mounts.write_text("36 35 98:0 / / rw,noatime - nfs4 server:/runs rw\n")
    monkeypatch.setattr(run_folder, "MOUNTS", mounts)
    found = list(doctor.places(tmp_path))
    assert found[0].state == "error" and "network file system (nfs4)" in found[0].text


def test_a_disk_with_another_time_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    class Late:
        st_mtime = 0.0

    monkeypatch.setattr(doctor.os, "stat", lambda path, **_: Late() if isinstance(path, str) else stat(path))
    clock = by_subject(doctor.places(tmp_path))["clock"]
    assert clock.state == "note" and "NTP" in clock.text


def test_cores_are_those_that_a_container_s_quota_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    many = configfile.load(MATH, ["rollout.actors=60000"])
    for found in (doctor.machine(), machine.places(many)):
        assert any("and 3 cores" in one.text for one in found)
