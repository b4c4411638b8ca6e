"""The filter of system calls, built for each machine and interpreted here: refused and allowed calls."""

import struct

import pytest

from streamppo.tasks.scorers import launcher

ALLOW, ENOSYS = 0x7FFF0000, 0x00050000 | 38
X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
"""AUDIT_ARCH of linux/audit.h."""
X32 = 0x40000000
ALONE = ["shmget", "semget", "msgget", "mq_open", "add_key", "request_key", "keyctl", "perf_event_open"]
ALONE += ["memfd_create", "bpf", "userfaultfd", "io_uring_setup", "memfd_secret"]
"""Calls whose memory no process and no file system shows."""
NUMBERS = {
    "x86_64": dict(zip(ALONE, [29, 64, 68, 240, 248, 249, 250, 298, 319, 321, 323, 425, 447], strict=True)),
    "aarch64": dict(zip(ALONE, [194, 190, 186, 180, 217, 218, 219, 241, 279, 280, 282, 425, 447], strict=True)),
}
"""Of arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h."""
USED = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "clone": 56, "fork": 57, "execve": 59, "socketpair": 53, "exit": 60},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "clone": 220, "execve": 221, "socketpair": 199, "exit": 93},
}
"""Calls of every Python."""


def answered(machine: str, arch: int, number: int) -> int:
    """Run the filter on a call as the kernel does (linux/filter.h)."""
    code = launcher.unaccounted_calls_filter(machine)
    program = list(struct.iter_unpack("HBBI", code))
    data = struct.pack("iIQ6Q", number if number < 2**31 else number - 2**32, arch, 0, *[0] * 6)
    place, accumulator = 0, 0
    while True:
        kind, if_true, if_false, operand = program[place]
        place += 1
        match kind:
            case 0x20:
                (accumulator,) = struct.unpack_from("I", data, operand)
            case 0x15:
                place += if_true if accumulator == operand else if_false
            case 0x35:
                place += if_true if accumulator >= operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"no instruction of a filter: {kind:#x}")


MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ALONE)
def test_a_call_whose_memory_nobody_shows_is_refused(machine: str, name: str) -> None:
    assert answered(machine, MACHINES[machine], NUMBERS[machine][name]) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_every_other_call_passes(machine: str) -> None:
    refused = {number for number in range(600) if answered(machine, MACHINES[machine], number) != ALLOW}
    assert refused == set(NUMBERS[machine].values())
    assert refused.isdisjoint(USED[machine].values())


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("other", [I386, X86_64, AARCH64, ARM, 0])
def test_no_call_passes_in_the_numbers_of_another_machine(machine: str, other: int) -> None:
    if other != MACHINES[machine]:
        assert {answered(machine, other, number) for number in range(600)} == {ENOSYS}


def test_no_call_passes_in_the_numbers_of_x32() -> None:
    assert {answered("x86_64", X86_64, X32 + number) for number in range(600)} == {ENOSYS}
    assert answered("x86_64", X86_64, 2**32 - 1) == ENOSYS


def test_an_unknown_machine_has_no_filter() -> None:
    assert launcher.unaccounted_calls_filter("riscv64") == b""
