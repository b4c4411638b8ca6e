"""The folder that an address belongs to: a run that is copied (`cp -r`) has the address of the first one in its files.

ADDRESS/owners/00000003-5e6f7a8b    the third driver that has claimed it: its token, and what its folder is
RUN/remote.address                  the address, and below it the tokens of this folder: the newest claim is one of them

Each driver claims the address anew. A folder whose tokens lack the newest one was copied before another went on; one
that is neither at the place nor the inode of the claim is the copy, unless it was restored of what is at the address
and takes it over: the first driver of either that begins has it. Needs no torch, no Ray.
"""

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from streamppo import durable
from streamppo.errors import UNREADABLE, CheckpointError
from streamppo.weights.store import ADDRESS, Store, row_of, with_crc

OWNERS = "owners"
TOKENS = 4
"""Tokens that a folder remembers: its newest claim may not have arrived at the address."""
log = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True):
    """A folder by its path and its inode: one that is moved keeps the second, one that is put back the first."""

    path: str
    inode: int


TAKES_OVER = "+"
"""Before the token of a claim that a restored run may follow, wherever its folder is."""


def tokens(run: Path) -> list[str]:
    """The tokens of the claims of the run in the folder `run`, the newest first."""
    return [token.removeprefix(TAKES_OVER) for token in _written(run)]


def token(run: Path) -> str:
    """The token of the last claim of the run in the folder `run`; empty without one."""
    return next((one for one in _written(run) if not one.startswith(TAKES_OVER)), "")


def newest(names: Sequence[str]) -> str:
    """The token of the newest claim among the `names` of all; empty without any."""
    return max(names, default="").partition("-")[2]


def other_owner(store: Store, run: Path) -> str:
    """Say which folder the address belongs to, if not to that of the run; empty if it does, or to nobody.

    Raises `CheckpointError` if the address does not answer.
    """
    names = store.names(OWNERS)
    if not names:
        return ""
    claim = _read(store, max(names))
    if newest(names) not in tokens(run):
        place = f" in {claim.path}" if claim else ""
        return f"another copy of this run goes on{place}, with the address {store.address}"
    takes_over = f"{TAKES_OVER}{newest(names)}" in _written(run)
    if claim and not takes_over and claim.path != str(run.resolve()) and claim.inode != run.stat().st_ino:
        return f"a copy of the run in {claim.path}, whose address is {store.address}"
    return ""


def claim(store: Store, run: Path) -> None:
    """Write into the folder `run`, and at the address, that this belongs to it.

    First into the folder: a death between the two leaves an address whose owner knows the token. Raises
    `CheckpointError` if the address refuses.
    """
    token, before = uuid4().hex[:12], store.names(OWNERS)
    write(run, store.address, [token, *tokens(run)])
    number = 1 + max((int(name.partition("-")[0]) for name in before), default=0)
    row = msgspec.json.encode(Claim(str(run.resolve()), run.stat().st_ino))
    store.put(OWNERS, {f"{number:08d}-{token}": io.BytesIO(with_crc(row))})
    for old in before:
        try:
            store.delete(f"{OWNERS}/{old}")
        except CheckpointError as error:
            log.info("a needless claim was not deleted: %s", error)


def hand_over(store: Store, run: Path) -> None:
    """Let the folder `run`, which is made of what is at the address, be the next one to claim it."""
    names = store.names(OWNERS)
    write(run, store.address, [f"{TAKES_OVER}{newest(names)}"] if names else [])


def write(run: Path, address: str, claims: Sequence[str] = ()) -> None:
    """Let the run in the folder `run` have this address, with the tokens of its claims."""
    with durable.naming(run / ADDRESS, CheckpointError):
        durable.write(run / ADDRESS, "\n".join([address, " ".join(claims[:TOKENS])]).strip().encode() + b"\n")


def owns(names: Sequence[str], run: Path) -> bool:
    """True if the newest claim among the `names` of all is one of the run in the folder `run`, or there is none."""
    return not names or newest(names) in tokens(run)


def forget(run: Path) -> str:
    """Say how a copy goes on as a run of its own."""
    return f"to go on with it as a run of its own, delete {run / ADDRESS}: it gets another address"


def _written(run: Path) -> list[str]:
    file = run / ADDRESS
    return durable.read(file).decode().split()[1:] if file.is_file() else []


def _read(store: Store, name: str) -> Claim | None:
    """A claim; None if it was cut off, or is none of ours."""
    row = row_of(store.read(OWNERS, name))
    try:
        return None if row is None else msgspec.json.decode(row, type=Claim)
    except UNREADABLE:
        return None
