# `just NAME` runs one of these in the environment of `pip install -c constraints.txt -e '.[test]'`.

# List the recipes
default:
    @just --list

# Format, lint, types and import direction: the same as pre-commit
check:
    ruff format --check .
    ruff check .
    pyright
    lint-imports

# All tests but the slow ones, as CI runs them
test:
    pytest -n 2

# The slow tests, or an eighth of them: `just slow --part 0/8`
slow *options:
    pytest -n 2 -m 'slow and not sglang' --durations=40 {{options}}

# The same with the lines that no test reaches; Ray's workers are not looked at. It takes a seventh more time
coverage:
    pytest -n 2 --cov=streamppo --cov-report=term-missing

# Unit and property tests that take less than 0.15 s each. `just quick tests/unit/queue` is a room
quick *paths="tests/unit tests/property":
    pytest -q -n 2 -m quick {{paths}}

# The tests that run the examples and the commands of the documentation
docs:
    pytest -q tests/unit/tasks/test_docs_rewards.py tests/unit/rollout/test_docs_agents.py tests/unit/test_benchmarks.py tests/unit/test_readme.py tests/unit/test_site.py tests/unit/test_tutorial.py

# The documentation as a site, at http://127.0.0.1:8000 (extra `docs`)
site:
    mkdocs serve
