"""The lists of versions that the tests also run with are those that pyproject.toml allows."""

import tomllib
from pathlib import Path

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
EXTRAS = ("test", "gym", "lora", "mcp", "agents")
"""`test` has the others."""
ABOVE = {"httpx", "openai", "triton", "uvicorn"}
"""litellm, mcp and torch need newer ones than streamppo."""
ASKED = [
    requirement
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(one for name in EXTRAS for one in OPTIONAL[name])])
    if requirement.name != PROJECT["name"]
]


def pinned(path: Path) -> dict[str, Version]:
    """The version of each package in a list."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version.split(";")[0].strip()) for name, version in pairs}


LISTS = {name: pinned(REPOSITORY / "tests" / "environments" / f"{name}.txt") for name in ("oldest", "newest")}
LISTS["constraints"] = pinned(REPOSITORY / "constraints.txt")


@pytest.mark.parametrize("name", LISTS)
def test_every_list_has_each_package_in_a_version_that_is_allowed(name: str) -> None:
    for asked in ASKED:
        assert LISTS[name][canonicalize_name(asked.name)] in asked.specifier, asked


def test_the_oldest_versions_are_the_bounds_but_where_another_package_needs_a_newer_one() -> None:
    above = {
        asked.name
        for asked in ASKED
        for bound in asked.specifier
        if LISTS["oldest"][canonicalize_name(asked.name)].release[: len(Version(bound.version).release)]
        != Version(bound.version).release
    }
    assert above == ABOVE
