"""The published recipes of configs/recipes are configurations that train, with nothing to note about them."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
import two_updates
from conftest import MATH, REPOSITORY

from streamppo.commands.checks.notes import settings
from streamppo.config import file as configfile
from streamppo.config.sections import Config

pytestmark = pytest.mark.usefixtures("alone")

RECIPES = {path.stem: tomllib.loads(path.read_text()) for path in (REPOSITORY / "configs" / "recipes").glob("*.toml")}
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text()


def config_of(name: str, folder: Path) -> Config:
    """A recipe over the task and the model of configs/math.toml, of whose mathematics nothing is left."""
    tree = tomllib.loads(MATH.read_text()) | {"algorithm": {}, "learner": {"lr": 1e-5}}
    tree["queue"] |= {"batch_size": 128, "samples_per_prompt": 1}
    for table, values in RECIPES[name].items():
        tree[table] |= values
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(tree))
    return configfile.load(path)


def test_the_page_names_every_recipe() -> None:
    section = PAGE.partition("\n## Published recipes\n")[2].partition("\n## ")[0]
    assert len(RECIPES) >= 11
    assert all(f"`{name}`" in section and "correction" in recipe["algorithm"] for name, recipe in RECIPES.items())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_makes_two_updates(name: str, tmp_path: Path) -> None:
    two_updates.make(config_of(name, tmp_path))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_nothing_is_noted_about_the_mathematics_of_a_recipe(name: str, tmp_path: Path) -> None:
    found = [one.text for one in settings(config_of(name, tmp_path), None)]
    assert [text for text in found if text.startswith("algorithm.") and "warmup" not in text] == []
