"""The completion scripts in the shells themselves, with the requests of a Tab."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamppo import cli

COMMANDS = {name for name in cli.app if not name.startswith("-")}


def script(shell: str, folder: Path) -> Path:
    """The file that `streamppo completion SHELL` prints."""
    file = folder / f"streamppo.{shell}"
    command = [sys.executable, "-m", "streamppo", "completion", shell]
    file.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    return file


def said(*command: str, folder: Path) -> list[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "TERM": "dumb"},
        cwd=folder,
        timeout=60,
    )
    assert not done.stderr
    return done.stdout.splitlines()


def test_bash_completes_commands_options_and_choices(tmp_path: Path) -> None:
    file = script("bash", tmp_path)

    def tab(*words: str) -> set[str]:
        asked = f"""
            source {file}
            COMP_WORDS=(streamppo {" ".join(f"'{word}'" for word in words)}) COMP_CWORD={len(words)}
            found=$(complete -p streamppo); found=${{found##*-F }}; ${{found%% *}}
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        return set(said("bash", "--norc", "-c", asked, folder=tmp_path))

    assert tab("") >= COMMANDS
    assert tab("wa") == {"watch"}
    assert tab("completion", "") == {"bash", "zsh", "fish"}
    assert {"--dry-run", "--runs"} <= tab("run", "--")


def test_fish_completes_commands_options_and_choices(tmp_path: Path) -> None:
    file = script("fish", tmp_path)

    def tab(line: str) -> set[str]:
        return {
            one.split("\t")[0]
            for one in said("fish", "--no-config", "-c", f"source {file}; complete -C '{line}'", folder=tmp_path)
        }

    assert tab("streamppo ") >= COMMANDS
    assert tab("streamppo completion ") == {"bash", "zsh", "fish"}
    assert {"--dry-run", "--runs"} <= tab("streamppo run --")


def test_zsh_completes_commands_options_and_choices(tmp_path: Path) -> None:
    """A shell of its own on a pseudo-terminal, since zsh completes nowhere else."""
    file = script("zsh", tmp_path)
    (tmp_path / ".zshrc").write_text(
        f"PS1='> '; LISTMAX=1000; autoload -Uz compinit; compinit -u; source {file}\n"
        "compdef _cyclopts_streamppo streamppo; bindkey '^I' list-choices\n"
    )

    def tab(line: str) -> str:
        asked = f"""
            zmodload zsh/zpty
            zpty shell zsh -i
            zpty -w shell {"'" + line + "'"}$'\\t'
            while zpty -r -t shell piece || (( tries++ < 30 )); do print -rn -- $piece; piece=; sleep 0.1; done
            zpty -d shell
        """
        return "\n".join(said("zsh", "-f", "-c", asked, folder=tmp_path))

    offered = tab("streamppo ")
    assert not [name for name in COMMANDS if f"{name} " not in offered]
    offered = tab("streamppo completion ")
    assert all(name in offered for name in ("bash", "zsh", "fish"))
