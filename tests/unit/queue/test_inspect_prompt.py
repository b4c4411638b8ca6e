"""A prompt is found by the journal's keys and the ranges of the archive, without opening every file."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from conftest import COUNTERS, trajectory

from streamppo.commands.look import inspect as inspection
from streamppo.config.sections import Config
from streamppo.errors import JournalError
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.store import archive
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.types import Batch

PROMPTS = {0: (2, 0, 1), 1: (3, 9), 2: (4, 5, 6), 3: (8, 7)}
"""The prompts of each batch: prompt 9 was in a hurry."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    journal, made = Journal(tmp_path / "journal.sqlite"), Archive(tmp_path / "archive", {})
    for version, prompts in PROMPTS.items():
        rows = tuple(trajectory([5, 6], number=prompt) for prompt in prompts)
        archived = made.write(Batch(version=version, min_version=version, trajectories=rows))
        one = PublishedVersion(version=version + 1, digest="", archived=archived)
        counters = msgspec.structs.replace(COUNTERS, version=version + 1)
        journal.write(Changes(counters), [one], made.settle)
    journal.close()
    return tmp_path


def test_an_update_without_a_batch_is_refused_under_its_own_number(
    run: Path, math_config: Callable[..., Config]
) -> None:
    with pytest.raises(JournalError, match=r": no batch of update 99: the archive has those of 1 to 4$"):
        inspection.inspect(math_config(), run, 99, 4)


@pytest.mark.parametrize(("prompt", "version"), [(n, version) for version, numbers in PROMPTS.items() for n in numbers])
def test_every_prompt_that_was_trained_on_is_found(
    run: Path, capsys: pytest.CaptureFixture[str], prompt: int, version: int
) -> None:
    assert inspection.inspect_prompt(run, prompt) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"test prompt {prompt}",
        f"  sample 0 attempt 0: trained on by update {version + 1}: reward 0, 2 tokens",
    ]


def test_only_the_files_that_can_have_a_prompt_are_opened(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    batch = Archive.batch
    monkeypatch.setattr(Archive, "batch", lambda found, version: (opened.append(version), batch(found, version))[1])
    inspection.inspect_prompt(run, 1)
    assert opened == [0]
    inspection.inspect_prompt(run, 5)
    assert opened == [0, 1, 2]


def test_a_prompt_that_no_batch_has_is_not_found_and_damage_of_its_file_is_named(run: Path) -> None:
    with pytest.raises(JournalError, match="prompt 10 was never issued"):
        inspection.inspect_prompt(run, 10)
    archive.open(run).path(2).write_bytes(b"")
    with pytest.raises(JournalError, match=r"00000002.zarr.zip: damaged"):
        inspection.inspect_prompt(run, 4)
