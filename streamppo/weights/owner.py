"""Makes sure that only one run folder writes to an address, although a copied run (`cp -r`) has the same address.

ADDRESS/owners/00000003-5e6f7a8b    the claim of the third driver: its token, and the path and inode of its folder
RUN/remote.address                  the address, and the tokens of the folder's claims, the newest first

Each driver makes a new claim on the address. If a folder's tokens lack the newest claim, another copy has continued the
run. If a folder has neither the path nor the inode of the newest claim, the folder is the copy. A folder that is
restored from the address may take over the newest claim: then the original and the restored run may both continue, and
the driver that starts first owns the address. This module imports neither torch nor Ray.
"""

import io
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from streamppo import durable
from streamppo.errors import UNREADABLE, CheckpointError
from streamppo.weights.store import ADDRESS, Store, row_of, with_crc

OWNERS = "owners"
NAME = re.compile(r"\d{8,}-[0-9a-f]{12}")
TOKENS = 4
"""The number of tokens stored in a folder: several, because the newest claim may not have reached the address."""
log = logging.getLogger(__name__)


class Claim(msgspec.Struct, frozen=True):
    """A folder's path and inode. A moved folder keeps its inode. A folder restored from a backup keeps its path."""

    path: str
    inode: int


TAKES_OVER = "+"
"""Marks a token in a restored folder: the folder may take over this claim, which has another path and inode."""


def tokens(run: Path) -> list[str]:
    """Return the tokens of the claims by the folder `run`, the newest first."""
    return [token.removeprefix(TAKES_OVER) for token in _claim_tokens(run)]


def token(run: Path) -> str:
    """Return the token of the last claim by the folder `run`; "" without a claim."""
    return next((claimed for claimed in _claim_tokens(run) if not claimed.startswith(TAKES_OVER)), "")


def claims_among(names: Sequence[str]) -> list[str]:
    """Return the claims in `names`, the names in the folder of claims; object stores may list the folder itself."""
    return list(filter(NAME.fullmatch, names))


def newest(names: Sequence[str]) -> str:
    """Return the token of the newest claim in `names`, the names of all claims; "" without claims."""
    return max(names, default="").partition("-")[2]


def other_owner(store: Store, run: Path) -> str:
    """Describe the folder that owns the address; "" if it is `run`, or there is none. Raises `CheckpointError`."""
    names = claims_among(store.names(OWNERS))
    if not names:
        return ""
    claim = _read(store, max(names))
    if newest(names) not in tokens(run):
        place = f" in {claim.path}" if claim else ""
        return f"another copy of this run continues{place}, with the address {store.address}"
    takes_over = f"{TAKES_OVER}{newest(names)}" in _claim_tokens(run)
    if claim and not takes_over and claim.path != str(run.resolve()) and claim.inode != run.stat().st_ino:
        return f"a copy of the run in {claim.path}, whose address is {store.address}"
    return ""


def claim(store: Store, run: Path) -> None:
    """Claim the address for the folder `run`. Raises `CheckpointError` if the address refuses."""
    # The folder gets the token first: a crash between the writes then leaves a folder that has the newest token.
    token, claims = uuid4().hex[:12], claims_among(store.names(OWNERS))
    write(run, store.address, [token, *tokens(run)])
    number = 1 + max((int(name.partition("-")[0]) for name in claims), default=0)
    row = msgspec.json.encode(Claim(str(run.resolve()), run.stat().st_ino))
    store.put(OWNERS, {f"{number:08d}-{token}": io.BytesIO(with_crc(row))})
    for old in claims:
        try:
            store.delete(f"{OWNERS}/{old}")
        except CheckpointError as error:
            log.info("an old claim was not deleted: %s", error)


def hand_over(store: Store, run: Path) -> None:
    """Allow the folder `run`, which was restored from the address, to take over the newest claim."""
    names = claims_among(store.names(OWNERS))
    write(run, store.address, [f"{TAKES_OVER}{newest(names)}"] if names else [])


def write(run: Path, address: str, claims: Sequence[str] = ()) -> None:
    """Write the address, and the tokens of its claims, into the folder `run`."""
    with durable.naming(run / ADDRESS, CheckpointError):
        durable.write(run / ADDRESS, "\n".join([address, " ".join(claims[:TOKENS])]).strip().encode() + b"\n")


def owns(names: Sequence[str], run: Path) -> bool:
    """Return whether the folder `run` made the newest claim in `names`; True if there are no claims."""
    return not names or newest(names) in tokens(run)


def separation_hint(run: Path) -> str:
    """Return a sentence on how to continue a copy as a separate run."""
    return f"to continue with it as a separate run, delete {run / ADDRESS}: it gets another address"


def _claim_tokens(run: Path) -> list[str]:
    file = run / ADDRESS
    return durable.read(file).decode().partition("\n")[2].split() if file.is_file() else []


def _read(store: Store, name: str) -> Claim | None:
    row = row_of(store.read(OWNERS, name))
    try:
        return None if row is None else msgspec.json.decode(row, type=Claim)
    except UNREADABLE:
        return None
