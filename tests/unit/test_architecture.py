"""The package is in order: format, lint, import direction, sizes, words; and its measures see each fault."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import LONGEST, REPOSITORY

from tests import architecture

SOURCES = sorted((REPOSITORY / "streamppo").rglob("*.py"))


def tool(*command: str) -> None:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing_to_format() -> None:
    tool(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_ruff_finds_nothing_to_lint() -> None:
    tool(sys.executable, "-m", "ruff", "check", ".")


def test_imports_go_down_only() -> None:
    tool(str(Path(sys.executable).parent / "lint-imports"))


# --- the bounds ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> dict[str, architecture.Measure]:
    return architecture.measures(architecture.sources())


@pytest.mark.parametrize("name", architecture.BOUNDS)
def test_the_package_keeps_its_bounds(name: str, measured: dict[str, architecture.Measure]) -> None:
    value, places = measured[name]
    assert value <= architecture.BOUNDS[name], "\n".join(
        [f"{name}: {value:g}, at most {architecture.BOUNDS[name]:g}", *places]
    )


def test_no_two_test_modules_share_a_name() -> None:
    # pytest imports each by its bare name: the second of two would not be collected.
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_tests_that_come_first_are_there() -> None:
    for name in LONGEST:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (REPOSITORY / file).read_text() if function else (REPOSITORY / file).is_file(), (
            name
        )


# --- the measures find what they are for: one fault each in a package of two packages ----------------------------

WALK = """\
\"\"\"Holds one function.\"\"\"

def walk(steps: int) -> int:
    \"\"\"Walk that many steps.\"\"\"
    return steps
"""


def package(folder: Path, **changed: str) -> dict[str, architecture.Measure]:
    """Measure a package of the modules run, hall.door and yard.gate, some of them changed."""
    modules = {
        "run": '"""Goes in."""\nfrom streamppo.hall import door\n\ndef enter():\n    """Go."""\n    door.walk(1)\n',
        "hall.door": '"""Opens."""\nfrom streamppo.yard.gate import walk as out\n\n'
        'def walk(steps: int) -> None:\n    """Walk."""\n    out(steps).backward()\n',
        "yard.gate": WALK,
    }
    for name, text in {**modules, **{name.replace("_", "."): text for name, text in changed.items()}}.items():
        path = (folder / "streamppo" / name.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return architecture.measures(architecture.sources(folder), (("run", "enter"), ("hall/door", "walk")))


def test_a_clean_package_has_no_fault(tmp_path: Path) -> None:
    clean = package(tmp_path)
    faults = (
        "modules in an import cycle",
        "packages in an import cycle",
        "Any per 1,000 lines",
        "broad excepts",
        "print",
    )
    assert [name for name in faults if clean[name].value] == []
    assert clean["undocumented public things"].value == 0
    assert clean["steps of the declared path not in the code"].value == 0
    assert (clean["packages"].value, clean["files at the top of streamppo/"].value) == (3, 1)


def test_a_cycle_of_modules_and_of_their_packages_is_found_even_inside_a_function(tmp_path: Path) -> None:
    text = WALK + "\ndef back():\n    from streamppo.hall.door import walk\n    walk(1)\n"
    found = package(tmp_path, yard_gate=text)
    assert list(found["modules in an import cycle"].places) == ["streamppo.hall.door", "streamppo.yard.gate"]
    assert list(found["packages in an import cycle"].places) == ["hall", "yard"]


def test_packages_in_a_cycle_are_found_where_no_two_modules_are(tmp_path: Path) -> None:
    found = package(tmp_path, yard_wall="from streamppo.hall import door\n")
    assert found["modules in an import cycle"].value == 0
    assert list(found["packages in an import cycle"].places) == ["hall", "yard"]


def test_a_function_of_61_lines_passes_the_bound_and_one_of_60_keeps_it(tmp_path: Path) -> None:
    for lines in (60, 61):
        text = WALK + "\ndef long():\n" + "    walk(1)\n" * (lines - 1)
        longest = package(tmp_path, yard_gate=text)["longest function"]
        assert longest.value == lines
        assert longest.places[0] == "streamppo.yard.gate: long"
        assert (longest.value > architecture.BOUNDS["longest function"]) == (lines == 61)


def test_a_seventh_parameter_a_fourth_level_and_a_401st_line_pass_their_bounds(tmp_path: Path) -> None:
    deep = "".join(f"{'    ' * level}if a:\n" for level in range(1, 5)) + "    " * 5 + "pass\n"
    text = WALK + "\ndef wide(a, b, c, d, e, f, g, *, h):\n" + deep
    found = package(tmp_path, yard_gate=text + "#\n" * (401 - len(text.splitlines())))
    for name in ("most parameters before *", "deepest nesting", "largest file"):
        assert found[name].value == architecture.BOUNDS[name] + 1, name


@pytest.mark.parametrize("use", ["x: Any = 1", "x: dict[str, Any] = {}", "x: typing.Any = 1", 'x: "list[Any]" = []'])
def test_every_way_to_write_any_is_counted_and_a_sentence_with_the_word_is_not(tmp_path: Path, use: str) -> None:
    text = f'"""Any number goes. Any."""\nimport typing\nfrom typing import Any\n\n{use}\ny = "Any"\n'
    found = package(tmp_path, yard_wall=text.replace('y = "Any"', 'y = "Any word"'))
    assert list(found["Any per 1,000 lines"].places) == ["streamppo.yard.wall:5"]


def test_prints_and_broad_excepts_are_found_with_their_places(tmp_path: Path) -> None:
    text = "try:\n    print(1)\nexcept (ValueError, Exception):\n    pass\ntry:\n    pass\nexcept OSError:\n    pass\n"
    found = package(tmp_path, yard_wall=text, commands_show="print(2)\n")
    assert list(found["print"].places) == ["streamppo.commands.show:1", "streamppo.yard.wall:2"]
    assert list(found["print outside commands"].places) == ["streamppo.yard.wall:2"]
    assert list(found["broad excepts"].places) == ["streamppo.yard.wall:3"]


def test_a_declared_path_that_the_code_does_not_take_is_found(tmp_path: Path) -> None:
    found = package(tmp_path, hall_door='"""Shut."""\ndef walk(steps):\n    """Stay."""\n')
    assert list(found["steps of the declared path not in the code"].places) == ["hall/door.walk -> backward"]


def test_a_public_thing_without_a_docstring_is_found(tmp_path: Path) -> None:
    found = package(tmp_path, yard_wall='"""Stands."""\ndef climb(): ...\ndef _fall(): ...\n')
    assert list(found["undocumented public things"].places) == ["streamppo.yard.wall: climb"]


def test_a_class_name_of_two_modules_and_a_pure_module_with_a_clock_are_found(tmp_path: Path) -> None:
    gate = '"""Holds. Pure."""\nimport asyncio\n\n\nclass Gate:\n    """One."""\n'
    found = package(tmp_path, yard_gate=WALK.replace("one function", "one function. Pure") + gate, yard_wall=gate)
    assert list(found["class names with several meanings"].places) == ["Gate: streamppo.yard.gate, streamppo.yard.wall"]
    assert "streamppo.yard.wall imports asyncio" in found["pure modules that are not"].places


def test_a_table_of_the_configuration_may_be_called_as_what_it_describes(tmp_path: Path) -> None:
    text = '"""Holds."""\n\n\nclass Gate:\n    """One."""\n'
    found = package(tmp_path, yard_wall=text, config_gate=text)
    assert found["class names with several meanings"].value == 0


# --- words and names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["old_log" + "probs", "old_logp", "TO" + "DO", "FIX" + "ME", "pickle.lo" + "ads"])
def test_banned_words_do_not_occur(word: str) -> None:
    assert [path for path in SOURCES if word in path.read_text()] == []


def test_a_command_that_is_printed_quotes_what_is_put_into_it() -> None:
    commands = re.compile(
        r"streamppo (?:run|resume|check|export|init|report|watch) \{(?!quoted|shlex|harmless\(shlex)[^}]*\}"
    )
    assert [path for path in SOURCES if commands.search(path.read_text())] == []


def test_every_metric_of_an_update_is_in_the_catalogue() -> None:
    """The names that the learner writes, found in its source, are the catalogue's names."""
    from streamppo.telemetry.catalogue import UPDATE

    learner = "".join(path.read_text() for path in SOURCES if "learner" in path.parts)
    assert [name for name in UPDATE if f'"{name}"' not in learner] == []


def test_the_constraints_pin_what_the_project_asks_for() -> None:
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["gym"], *extras["docs"]]
    names = {requirement.split(">=")[0].split("[")[0].lower() for requirement in wanted} - {"streamppo"}
    assert names <= pinned, names - pinned
