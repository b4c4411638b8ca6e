"""The README's tree is the tree: one clause for everything at its first two levels, and for nothing else."""

import re
import subprocess

from conftest import REPOSITORY

from streamppo import cli
from streamppo.algorithms.diagnostics import LAG_BUCKETS

README = (REPOSITORY / "README.md").read_text()
HIDDEN = {".ci"}
"""Folders that the tree shows though their names begin with a dot."""


def entries(indent: int) -> dict[str, str]:
    """The tree's lines at one depth: name -> clause."""
    tree = README.partition("## The tree")[2].partition("\n[docs/")[0]
    found = re.findall(rf"^ {{{indent}}}(\S+) +(\S.*)$", tree, re.MULTILINE)
    return {name.split("/")[0]: clause for name, clause in found}


def tracked(folder: str) -> set[str]:
    """The names right under a folder that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "--", folder], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    paths = [line.removeprefix(f"{folder}/" if folder != "." else "") for line in listed.stdout.splitlines()]
    return {path.split("/")[0] for path in paths}


def test_the_readme_has_a_clause_for_everything_at_the_top() -> None:
    shown = {name for name in tracked(".") if not name.startswith(".") or name in HIDDEN} - {"README.md"}
    assert set(entries(4)) == shown


def test_the_readme_has_a_clause_for_every_room_and_file_of_the_package() -> None:
    assert set(entries(6)) == tracked("streamppo")


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    missing = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        # `a[](b)` is the name of a field.
        for link in re.findall(r"\]\(([^)#]+)", re.sub(r"`[^`\n]*`", "", page.read_text())):
            if not link.startswith("http") and not (page.parent / link).exists():
                missing.append(f"{page.name}: {link}")
    assert missing == []


def test_the_readme_names_the_commands_that_there_are() -> None:
    commands = set(re.findall(r"^    streamppo ([a-z-]+) ", README, re.MULTILINE))
    there = {name for name in cli.app if not name.startswith("-")}
    assert commands >= {"run", "resume", "replay", "inspect", "report", "check"}
    assert commands <= there, "nothing that is not there"


def test_the_lags_of_the_algorithms_page_are_the_codes() -> None:
    page = (REPOSITORY / "docs" / "algorithms.md").read_text()
    (told,) = re.findall(r"overall and for lags (.*) and (\S+):$", page, re.MULTILINE)
    assert (*told[0].split(", "), told[1]) == LAG_BUCKETS


def test_every_file_that_the_status_names_is_there() -> None:
    named = re.findall(
        r"\b((?:tests|benchmarks|configs|docs)/[\w./-]+)", (REPOSITORY / "docs" / "status.md").read_text()
    )
    assert len(named) > 30
    assert [name for name in named if not (REPOSITORY / name.rstrip(".")).exists()] == []
