"""The documentation is a site: it is built without a warning, has every page, and loads nothing from the network."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import needs_chromium, opened
from conftest import REPOSITORY

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("material", reason="the extra `docs` is not installed")
LOADED = re.compile(r"<(?:link|script|img)\b[^>]*?\b(?:href|src)=[\"']?((?:https?:)?//[^\"' >]+)", re.IGNORECASE)


def build(repository: Path, to: Path) -> str:
    """Build the site as a user does, with every warning an error; the program's output."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)],
        cwd=repository,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return f"exit code {done.returncode}\n{done.stdout}"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the built site, and the output of its building."""
    folder = tmp_path_factory.mktemp("site")
    return folder, build(REPOSITORY, folder)


def copy(tmp_path: Path) -> Path:
    """Copy all that the site is made of, to change it."""
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    for folder in ("benchmarks", "configs", "examples", "streamppo", "tests"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    return tmp_path


def test_the_site_is_built_without_a_warning_and_has_every_page(output: tuple[Path, str]) -> None:
    site, said = output
    assert said.startswith("exit code 0") and "WARNING" not in said, said
    front = (site / "index.html").read_text()
    pages = {page.stem for page in (REPOSITORY / "docs").glob("*.md")}
    assert pages <= {Path(link).stem for link in re.findall(r'href="([\w./-]+\.html|\.)"', front)} | {"index"}
    assert all((site / f"{page}.html").exists() for page in pages)
    assert not (site / "site").exists(), "the hook is not a part of the site"


def test_no_page_loads_anything_from_the_network(output: tuple[Path, str]) -> None:
    for page in output[0].glob("*.html"):
        assert LOADED.findall(page.read_text()) == [], page.name


def test_a_link_out_of_the_site_is_a_path_and_a_bar_in_the_code_of_a_table_is_a_bar(output: tuple[Path, str]) -> None:
    assert "<code>streamppo/queue/rules/ahead.py</code>" in (output[0] / "off-policy.html").read_text()
    assert "<code>eval RUN|MODEL [CONFIG]</code>" in (output[0] / "commands.html").read_text()
    assert [page.name for page in output[0].glob("*.html") if re.search(r'href="\.\./', page.read_text())] == []


@pytest.mark.parametrize(
    ("words", "page"),
    [("resume", "recovery"), ("reward", "rewards"), ("out of memory", "performance"), ("stale", "off-policy")],
)
def test_the_search_knows_the_page_of_a_word(words: str, page: str, output: tuple[Path, str]) -> None:
    entries = json.loads((output[0] / "search" / "search_index.json").read_text())["docs"]
    found = {one["location"].partition(".")[0] for one in entries if words in f"{one['title']} {one['text']}".lower()}
    assert page in found


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_begins_with_its_reader_and_what_he_can_do_after_it(page: Path) -> None:
    first = page.read_text().split("\n\n")[1]
    assert page.stem == "index" or (first.startswith("For ") and "After this page you" in " ".join(first.split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[a page](nowhere.md)", "'nowhere.md', but the target is not found"),
        ("[a heading](ppo.md#nowhere)", "does not contain an anchor '#nowhere'"),
        ("[a file](../streamppo/nowhere.py)", "'../streamppo/nowhere.py'"),
        ("![a picture](images/nowhere.png)", "'images/nowhere.png', but the target is not found"),
    ],
)
def test_a_broken_link_fails_the_build(text: str, warning: str, tmp_path: Path) -> None:
    page = copy(tmp_path) / "docs" / "index.md"
    page.write_text(f"{page.read_text()}\n{text}\n")
    said = build(tmp_path, tmp_path / "out")
    assert not said.startswith("exit code 0") and warning in said, said


@pytest.mark.slow
def test_a_page_that_the_navigation_lacks_fails_the_build(tmp_path: Path) -> None:
    (copy(tmp_path) / "docs" / "lonely.md").write_text("# Lonely\n")
    said = build(tmp_path, tmp_path / "out")
    assert not said.startswith("exit code 0") and "lonely.md" in said, said


@needs_chromium
@pytest.mark.parametrize("width", [500, 1400])
def test_a_browser_shows_the_site_without_an_error(width: int, output: tuple[Path, str], tmp_path: Path) -> None:
    shown, errors = opened((output[0] / "ppo.html").as_uri(), width, tmp_path / "browser", 2)
    assert errors == []
    assert "Boil" in shown and "md-nav" in shown
