"""Consent to the code that a run's configuration names, and to the addresses that get an API key.

STATE/streamppo/secret   32 random bytes of this user; STATE is XDG_STATE_HOME or ~/.local/state
RUN/consent              a line for each name to which this user has agreed: the name's HMAC with the secret
FILE.consent             the same for the file of a bundle

The user who starts a run agrees by starting it. Any other user must agree once to the run's code. Only with the user's
secret can a valid line be made. A file of code has two lines: its path, if it is outside the run's folder, and its path
relative to the run with its content. The second stays valid if the run is moved or copied with its code. With
STREAMPPO_TRUST=1, for scripts, a command runs all code without consent.
"""

import hmac
import logging
import os
import secrets
import shlex
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec

from streamppo import durable
from streamppo.config.overrides import Tree
from streamppo.config.sections import Config
from streamppo.errors import ConfigError, StreamppoError

FILE = "consent"
VARIABLE = "STREAMPPO_TRUST"
BUILT_IN = frozenset(
    f"streamppo.tasks.{name}"
    for name in (
        *("library.arithmetic:score", "library.calculator:Calculator", "library.gym:score", "scorers.code:CodeTests"),
        *("scorers.maths:Math", "scorers.maths:gsm8k", "scorers.maths:numeric", "scorers.bubblewrap:Bubblewrap"),
        *("scorers.format_reward:Overlong", "scorers.format_reward:Pattern", "scorers.format_reward:think_answer"),
    )
)
"""Names in streamppo that run only streamppo's code. Other names (`Local`, `plugins:load`) may run other code."""
MOST_LINES, MOST_CODE = 2**20, 2**26
"""Maximum bytes of RUN/consent, and of a code file whose content is part of a line."""
CODE = ("environment.name", "environment.agent", "environment.sandbox.name", "rollout.limit", "task.environment")
"""Fields whose values name code, in addition to fields named `function`."""
SHOWN, LENGTH = 10, 300
"""Maximum number of names in an error message, and of characters of each name."""

log = logging.getLogger(__name__)


def code(config: Config) -> set[str]:
    """Return the code outside `BUILT_IN` that a run of `config` runs, and the addresses that get an API key."""
    return set(_file_names(cast(Tree, msgspec.to_builtins(config)), "")) - BUILT_IN


def _file_names(tree: Tree, path: str) -> Iterator[str]:
    for urls, key_env in (("url", "key_env"), ("urls", "api_key_env")):
        if tree.get(urls) and tree.get(key_env):
            addresses = tree[urls] if isinstance(tree[urls], tuple) else [tree[urls]]
            yield f"{path}: the key in {tree[key_env]} for {', '.join(cast(Sequence[str], addresses))}"
    for key, value in tree.items():
        at = f"{path}.{key}" if path else key
        for table in cast(Sequence[object], value if isinstance(value, list | tuple) else [value]):
            if isinstance(table, dict):
                yield from _file_names(cast(Tree, table), at)
        if at.startswith("rollout.engine.args.") or (
            at == "cluster.address" and value not in ("", "local", "auto", None)
        ):
            yield f"{at} = {value}"
        elif isinstance(value, str) and value:
            # An argument of a scorer or environment may name a class, a sandbox or a verifiers environment.
            is_argument = ".arguments." in at and (":" in value or key == "environment")
            if key == "function" or at in CODE or is_argument:
                yield value
        elif at == "environment.command" and value:
            yield shlex.join(cast(Sequence[str], value))


def give(run: Path, config: Config) -> None:
    """Record this user's consent to the code and addresses in `config`, or log a warning."""
    names_of_code = code(config)
    if not names_of_code:
        return
    try:
        secret = _secret(make=True)
        lines = _lines(run).union(*(_sign(secret, name, run) for name in names_of_code))
        durable.write(_file(run), "".join(f"{line}\n" for line in sorted(lines)).encode())
    except (OSError, RuntimeError, StreamppoError) as error:
        log.warning(f"{run}: your trust in this run's code cannot be recorded ({error}): `resume` will ask for --trust")


def require(run: Path, configs: Iterable[Config], typed: Set[str] = frozenset(), *, trust: bool = False) -> None:
    """Raise `ConfigError` if this user has not agreed to all code and addresses in `configs` of the run in `run`.

    The user agrees to names that are `typed` in the command.
    """
    configs = list(configs)
    names_of_code = set[str]().union(*map(code, configs)) - typed
    if not names_of_code:
        return
    if trust or os.environ.get(VARIABLE) == "1":
        for config in configs if trust else ():
            give(run, config)
        return
    try:
        secret, lines = _secret(make=False), _lines(run)
        unknown = {name for name in names_of_code if lines.isdisjoint(_sign(secret, name, run))}
    except (OSError, RuntimeError):
        unknown = names_of_code
    if unknown:
        names = [ascii(name if len(name) <= LENGTH else f"{name[:LENGTH]}...") for name in sorted(unknown)]
        further = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ConfigError(
            f"{run}: you have not agreed yet that its configuration runs, or sends a key to, "
            f"{', '.join(names[:SHOWN])}{further}: read that code, then agree once with --trust (in a script "
            f"{VARIABLE}=1)"
        )


def _secret(*, make: bool) -> bytes:
    """Return this user's secret; `make` a missing one. Raises `OSError`, and `RuntimeError` without a home folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "streamppo"
    file = folder / "secret"
    if make and not file.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = folder / f"secret.{os.getpid()}.{secrets.token_hex(4)}"
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(32))
        durable.flush(aside)
        try:
            # Of two secrets made at the same time, the first is kept.
            os.link(aside, file)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    secret = file.read_bytes()
    if len(secret) != 32:
        raise OSError(f"{file}: not 32 bytes")
    return secret


def _file(run: Path) -> Path:
    return run.with_name(f"{run.name}.{FILE}") if run.is_file() else run / FILE


def _lines(run: Path) -> set[str]:
    file = _file(run)
    if not file.is_file():
        return set()
    with durable.reading(file) as stream:
        return set(stream.read(MOST_LINES).decode("ascii", "replace").split())


def _sign(secret: bytes, name: str, run: Path) -> set[str]:
    """Return the HMAC of `name`, unless it names a file in the run, and the HMAC of `name` with its files' content."""
    texts = {name}
    # A name with NUL or a lone surrogate cannot be a file's name, and a text with a single quote is not a command.
    with suppress(ValueError):
        file, colon, attribute = name.rpartition(":")
        is_function = bool(colon) and file.endswith(".py")
        folder, words = run.resolve(), [file] if is_function else shlex.split(name)
        covered = [_with_content(word, folder) for word in words]
        with_content = "\0".join([*covered, attribute] if is_function else covered)
        is_inside = any(_is_file_in(word, folder) for word in words)
        texts = {with_content} if is_inside else {with_content, name}
    return {hmac.new(secret, text.encode("utf-8", "backslashreplace"), "sha256").hexdigest() for text in texts}


def _is_file_in(word: str, folder: Path) -> bool:
    return os.path.isabs(word) and Path(word).resolve().is_relative_to(folder) and Path(word).is_file()


def _with_content(word: str, folder: Path) -> str:
    """Return the path of a code file relative to `folder`, with the file's digest; another `word` unchanged."""
    if _is_file_in(word, folder):
        path = Path(word).resolve()
        if path.stat().st_size > MOST_CODE:
            raise OSError(f"{path}: {path.stat().st_size:,} bytes are not code")
    else:
        path = Path(word)
        is_near = path.is_absolute() and os.path.commonpath([path, folder]) != os.sep
        if not is_near or not path.is_file() or path.stat().st_size > MOST_CODE:
            return word
    return f"{os.path.relpath(path, folder)}\0{durable.sha256(path)}"
