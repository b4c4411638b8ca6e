"""Nodes whose network fails: the wait for a new update, and cut links."""

import socket
import subprocess
import sys

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks.lib import networks
from benchmarks.lib.networks import longest_wait

REFUSAL = networks.refusal()
needs_networks = pytest.mark.skipif(bool(REFUSAL), reason=f"no networks: {REFUSAL}")


@pytest.mark.parametrize(
    ("first", "last", "waited"), [(1, 4, 60.0), (1, 2, 1.0), (3, 4, 0.5), (4, 9, None), (7, 9, None)]
)
def test_the_longest_wait_for_a_new_update_is_between_two_that_follow_each_other(
    first: int, last: int, waited: float | None
) -> None:
    lines = [{"update": number + 1, "wall_s": wall_s} for number, wall_s in enumerate([2.0, 3.0, 63.0, 63.5])]
    assert longest_wait(lines, first, last) == waited


def reaches(where: list[str], address: str, port: int) -> bool:
    """True if a program within a namespace can open a connection."""
    talk = f"import socket; socket.create_connection(({address!r}, {port}), 1.5)"
    return subprocess.run([*where, sys.executable, "-c", talk], capture_output=True, check=False).returncode == 0


@needs_networks
def test_two_nodes_that_are_cut_off_from_each_other_both_reach_the_head() -> None:
    with networks.made() as made, socket.create_server((made.head.address, 0)) as head:
        near, far = made.join(), made.join()
        serve = f"import socket, time; one = socket.create_server(({far.address!r}, 5555)); print(flush=True); "
        with subprocess.Popen(
            [*far.prefix, sys.executable, "-c", serve + "time.sleep(60)"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline()
            seen: list[tuple[bool, bool]] = []
            for change in (None, made.cut, made.mend):
                if change:
                    change(near, far)
                to_head = reaches(near.prefix, made.head.address, head.getsockname()[1])
                seen.append((reaches(near.prefix, far.address, 5555), to_head))
            process.kill()
    assert seen == [(True, True), (False, True), (True, True)]


@needs_networks
def test_a_link_that_is_cut_lets_nothing_pass_and_an_open_connection_goes_on_when_it_is_mended() -> None:
    with networks.made() as made, socket.create_server((made.head.address, 0)) as head:
        near, far = made.join(), made.join()
        talk = f"import socket as s, sys; one = s.create_connection(({made.head.address!r}, {head.getsockname()[1]})); "
        talk += "[(sys.stdin.readline(), one.send(b'x')) for _ in range(2)]; sys.stdin.readline()"
        with subprocess.Popen([*near.prefix, sys.executable, "-c", talk], stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            connection, where = head.accept()
            with connection:
                assert where[0] == near.address != far.address
                process.stdin.write("\n")
                process.stdin.flush()
                connection.settimeout(10)
                assert connection.recv(1) == b"x"
                made.cut(near)
                process.stdin.write("\n")
                process.stdin.flush()
                connection.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                made.mend(near)
                connection.settimeout(10)
                assert connection.recv(1) == b"x"
            process.stdin.close()
