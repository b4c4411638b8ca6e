"""The README runs as it stands; the tree of docs/architecture.md has a clause for all of its first two levels."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bring_case
import pytest
from conftest import REPOSITORY

from streamppo import cli
from streamppo.algorithms.diagnostics import LAG_BUCKETS

README = (REPOSITORY / "README.md").read_text()
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
TREE = (REPOSITORY / "docs" / "architecture.md").read_text().partition("## The tree\n")[2].partition("\nImports")[0]
PAGES = sorted(
    page for place in ("*", "docs/*", "examples/*", "benchmarks/*/*") for page in REPOSITORY.glob(f"{place}.md")
)
HIDDEN = {".ci"}
"""Folders that the tree shows though their names begin with a dot."""


def entries(indent: int) -> dict[str, str]:
    """The tree's lines at one depth: name -> clause."""
    found = re.findall(rf"^ {{{indent}}}(\S+) +(\S.*)$", TREE, re.MULTILINE)
    return {name.split("/")[0]: clause for name, clause in found}


def tracked(folder: str) -> set[str]:
    """The names right under a folder that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "--", folder], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    paths = [line.removeprefix(f"{folder}/" if folder != "." else "") for line in listed.stdout.splitlines()]
    return {path.split("/")[0] for path in paths}


def test_the_tree_has_a_clause_for_everything_at_the_top() -> None:
    shown = {name for name in tracked(".") if not name.startswith(".") or name in HIDDEN} - {"README.md"}
    assert set(entries(4)) == shown


def test_the_tree_has_a_clause_for_every_room_and_file_of_the_package() -> None:
    assert set(entries(6)) == tracked("streamppo")


def anchors(page: Path) -> dict[str, str]:
    """The anchors of a page's headings: that of the repository's web page -> that of the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {slug: re.sub("-+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere_in_the_repository_as_on_the_site(page: Path) -> None:
    # `a[](b)` is the name of a field.
    text = re.sub(r"`[^`\n]*`", "", page.read_text())
    for link, path, anchor in re.findall(r"\]\((?!http)(([^)#]*)#?([^)]*))\)", text):
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchors(target).get(anchor) == anchor, link


def test_every_file_that_contributing_names_is_there() -> None:
    named = {name for name in re.findall(r"`([a-z_]+/[\w./-]+\.\w+)`", CONTRIBUTING) if "NAME" not in name}
    assert len(named) > 35
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_every_function_that_contributing_gives_a_case_has_cases() -> None:
    steps = re.findall(r"^- (`streamppo/.*?)(?=\n- |\n\n)", CONTRIBUTING, re.DOTALL | re.MULTILINE)
    names = [(step.split("`")[1], name) for step in steps for name in re.findall(r"`case`.*? in `(\w+)`", step)]
    assert len(names) >= 5
    for file, name in names:
        body = (REPOSITORY / file).read_text().partition(f"def {name}(")[2].partition("\ndef ")[0]
        assert " case " in body, f"{file}: {name}"


def test_the_readme_names_the_commands_that_there_are() -> None:
    commands = set(re.findall(r"^    streamppo ([a-z-]+) ", README, re.MULTILINE))
    there = {name for name in cli.app if not name.startswith("-")}
    assert commands >= {"run", "resume", "replay", "inspect", "report", "check"}
    assert commands <= there, "nothing that is not there"


def test_the_page_about_commands_has_every_command() -> None:
    page = (REPOSITORY / "docs" / "commands.md").read_text()
    there = {name for name in cli.app if not name.startswith("-")}
    assert {name for name in there if not re.search(rf"`{name}\b", page)} == set()


def test_the_readme_s_configuration_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    bring_case.model(tmp_path / "model", context=1024)
    bring_case.rows(tmp_path / "train.jsonl")
    (tmp_path / "rewards.py").write_text(bring_case.REWARD)
    (tmp_path / "mine.toml").write_text(block)
    assert cli.main(["check", "mine.toml"]) == 0
    assert "mine.toml: 0 errors" in capsys.readouterr().out


def test_the_readme_s_block_writes_rows_a_reward_and_a_configuration_that_check_has_nothing_against(
    tmp_path: Path,
) -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    script = block.replace("streamppo run mine.toml", "streamppo check mine.toml")
    assert script != block
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mine.toml: 0 errors" in done.stdout
    assert len((tmp_path / "sums" / "train.jsonl").read_text().splitlines()) == 450


def test_the_page_about_what_is_your_own_brings_a_row_a_task_and_a_reward_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "own.md").read_text()
    blocks = dict(re.findall(r"^```(json|toml|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    bring_case.model(tmp_path / "model", template=bring_case.TEMPLATE, context=1024)
    row = json.loads(blocks["json"])
    bring_case.rows(tmp_path / "train.jsonl", [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(100)])
    (tmp_path / "rewards.py").write_text(blocks["python"])
    written = 'model.path = "model"\nrollout.max_tokens = 64\nreward.function = "rewards.py:score"\n' + blocks["toml"]
    (tmp_path / "mine.toml").write_text(written)
    assert cli.main(["check", "mine.toml"]) == 0
    assert "mine.toml: 0 errors" in capsys.readouterr().out


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


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
