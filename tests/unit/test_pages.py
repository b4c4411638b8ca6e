"""Commands, tables and assignments of the documentation are those of the program."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MATH, REPOSITORY
from msgspec import inspect

from streamppo import cli
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import ConfigError
from tests import reference

PAGES = sorted(page for place in ("*", "docs/*", "examples/*") for page in REPOSITORY.glob(f"{place}.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"((?:^    .*\n|^\n(?=    ))+)", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"^(?:\$ |\w+=\w+ )*(streamppo [a-z-]+ .*)$", re.MULTILINE)
MISTAKE = "learner.lrr=3e-4"
"""The override of docs/tutorial.md that is a mistake."""
ENGINE = {"rollout.engine.routes": "rollout.engine.kind=sglang"}
"""What a run has whose override a page shows, by the field."""
FOREIGN = {"prox_logp_method", "log_level"}
"""Names of AReaL and of SGLang."""
FIELDS = list(reference.fields(inspect.type_info(Config), "", {}))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The language and the text of each block of code."""
    text = page.read_text().replace("\\\n", " ")
    yield from FENCE.findall(text)
    for block in INDENTED.findall(FENCE.sub("", text)):
        yield "", re.sub(r"^    ", "", block, flags=re.MULTILINE)


def inline(page: Path) -> list[str]:
    """The code within sentences."""
    return [" ".join(code.split()) for code in INLINE.findall(FENCE.sub("", page.read_text()))]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command after `streamppo`, and in a sentence only if it names a file."""
    texts = [text for _, text in blocks(page)]
    texts += [code for code in inline(page) if re.search(r"RUN\b|CONFIG\b|runs/|\.toml", code) and "|" not in code]
    for line in (line for text in texts for line in COMMAND.findall(text)):
        words = shlex.split(line, comments=True)
        yield words[1 : words.index(">") if ">" in words else None]


def tables(page: Path) -> Iterator[str]:
    """The blocks that are a configuration, or a part of one."""
    for kind, text in blocks(page):
        if kind == "toml" or (not kind and re.match(r"\[\w[\w.]*\]\n|[a-z_]+(\.[a-z_]+)* = ", text)):
            yield text


COMMANDS = {page: list(commands(page)) for page in PAGES}
TABLES = {page: list(tables(page)) for page in PAGES}


def test_the_pages_have_commands_and_tables() -> None:
    assert sum(map(len, COMMANDS.values())) > 80
    assert sum(map(len, TABLES.values())) > 15


@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=lambda page: page.stem)
def test_the_program_takes_every_command_of_a_page(page: Path) -> None:
    for words in COMMANDS[page]:
        if "streamppo" in words:
            continue
        cli.app.parse_args(words, exit_on_error=False, print_error=False)
        changes = [word for word in words if re.match(r"[a-z_.]+=", word) and word != MISTAKE]
        given = [ENGINE[name] for change in changes if (name := change.partition("=")[0]) in ENGINE]
        configfile.load(MATH, [*given, *changes])


def test_every_option_that_a_sentence_gives_a_command_is_one() -> None:
    options = {
        name: {option for argument in cli.app[name].assemble_argument_collection() for option in argument.names}
        for name in cli.app
        if not name.startswith("-")
    }
    given = [
        (page.stem, name, option)
        for page in PAGES
        for code in inline(page)
        if (name := code.removeprefix("streamppo ").partition(" ")[0]) in options
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", code)
    ]
    assert len(given) > 20
    assert [one for one in given if one[2] not in options[one[1]]] == []


@pytest.mark.parametrize("page", [page for page in PAGES if TABLES[page]], ids=lambda page: page.stem)
def test_every_field_of_a_page_s_table_is_one(page: Path, tmp_path: Path) -> None:
    for text in TABLES[page]:
        path = tmp_path / "page.toml"
        path.write_text(text)
        try:
            configfile.load(path)
        except ConfigError as error:
            mistakes = [line for line in str(error).splitlines() if "missing required" not in line]
            assert not mistakes, text


def test_every_text_that_a_sentence_gives_a_field_is_one_of_its_values() -> None:
    assigned = re.compile(r"([a-z_]+(?:\.[a-z_]+)*) = \"(\w+)\"")
    found = [
        (page.stem, *match.groups()) for page in PAGES for code in inline(page) if (match := assigned.fullmatch(code))
    ]
    assert len(found) > 40
    assert [one for one in found if one[1] not in FOREIGN and not takes(*one[1:])] == []


def takes(name: str, value: str) -> bool:
    """Whether a field, named from any of its tables on, takes a text: as a value, or as the name of a kind."""
    if name == "kind":
        return any(f"({value})" in field.name for field in FIELDS)
    tables = r"(?:\([^)]*\))?\.".join(map(re.escape, name.split(".")))
    at = re.compile(rf"(?:.*[.)\]])?{tables}(?:\(([^)]*)\)(?:\..*)?)?")
    for field in FIELDS:
        if match := at.fullmatch(field.name):
            values = "" if match[1] else field.values
            if match[1] == value or values == "a text" or f'"{value}"' in values:
                return True
    return False
