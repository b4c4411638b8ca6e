"""The files of a split are those named after it; others are reported or refused."""

import gzip
import json
import re
from pathlib import Path

import pytest
from config_case import one_source

from streamppo.errors import TaskError
from streamppo.tasks import files, task

ROW = json.dumps({"prompt": "x", "answer": "1"}) + "\n"


def made(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ROW)
    return folder


def found(folder: Path, split: str = "train") -> tuple[set[str], set[str]]:
    seen = files.find(folder, split)
    return {str(one.relative_to(folder)) for one in seen.of_split}, set(seen.doubtful)


OF_TRAIN = [
    "train.jsonl",
    "train.jsonl.gz",
    "train.json",
    "train/anything.json.gz",
    "train-00000-of-00002.parquet",
    "train-00000-of-00001-a09b74b3ef9c3b56.parquet",
    "train_0.jsonl",
    "train.00001.jsonl",
    "train/anything.jsonl",
    "train/0000.parquet",
    "data/train-00000-of-00001.parquet",
    "main/train/a.arrow",
    "train/train-00000-of-00001.parquet",
    "train.csv",
    "train-00000-of-00002.csv.gz",
    "train/anything.tsv",
]
DOUBTFUL = ["nest/test/train.jsonl", "train-old.jsonl", "train.copy.jsonl", "train_en.jsonl", "train/test.jsonl"]
OF_NONE = [".cache/train.jsonl", ".train.jsonl", "a/.git/train/x.jsonl", "test.jsonl", "trainer.jsonl", "other.jsonl"]


@pytest.mark.parametrize("name", OF_TRAIN)
def test_a_file_named_after_the_split_is_of_it(tmp_path: Path, name: str) -> None:
    assert found(made(tmp_path, name, "test.jsonl")) == ({name}, set())


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_file_that_may_be_meant_otherwise_is_not_read_and_is_said(tmp_path: Path, name: str) -> None:
    made(tmp_path, name)
    with pytest.raises(TaskError, match=r"no file of the split 'train'.* a single file can be named as `data`"):
        files.find(tmp_path, "train")
    assert found(made(tmp_path, "train.jsonl")) == ({"train.jsonl"}, {name})
    built = task.build(one_source(data=str(tmp_path), held_out=0.0), 1)
    assert len(built.training) == 1
    assert built.notes() == [f"data: not read, although named like the split 'train' in {tmp_path}: {name}"]


@pytest.mark.parametrize("name", OF_NONE)
def test_a_hidden_file_and_one_of_another_name_are_not_of_the_split(tmp_path: Path, name: str) -> None:
    assert found(made(tmp_path, name, "train.jsonl")) == ({"train.jsonl"}, set())


@pytest.mark.parametrize(
    "name", ["train.feather", "train.json.zst", "train-00001-of-00002.jsonl.zst", "train.csv.zst", "a/train.ndjson"]
)
def test_data_of_the_split_in_a_form_that_is_not_read_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        TaskError, match=f"{name} of the split 'train' cannot be read: convert it to jsonl, csv or parquet"
    ):
        files.find(made(tmp_path, name, "train.jsonl"), "train")
    made(tmp_path, "test.jsonl")
    assert found(tmp_path, "test")[0] == {"test.jsonl"}


@pytest.mark.parametrize("names", [("train.csv", "train.jsonl"), ("train/a.jsonl", "train/a.jsonl.gz")])
def test_two_files_that_differ_in_their_endings_alone_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    first, second = map(re.escape, names)
    with pytest.raises(TaskError, match=f"{first} and {second} differ only in their endings.*move one away"):
        files.find(made(tmp_path, *names), "train")


def test_files_that_hold_no_rows_are_no_data(tmp_path: Path) -> None:
    descriptions = ("train/dataset_info.json", "train/state.json.bak", "dataset_infos.json", "dataset_dict.json")
    made(tmp_path, "train/data-00000-of-00001.arrow", "README.md", *descriptions)
    assert found(tmp_path) == ({"train/data-00000-of-00001.arrow"}, set())


def test_a_jsonl_that_is_compressed_is_read_alone_and_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(ROW.encode() * 3))
    for data in (tmp_path, tmp_path / "train.jsonl.gz"):
        assert len(task.build(one_source(data=str(data), held_out=0.0), 1).training) == 3


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(ROW.encode())[:-4]], ids=["text", "part"])
def test_a_compressed_file_that_is_damaged_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.jsonl.gz").write_bytes(content)
    with pytest.raises(TaskError, match=r"train.jsonl.gz: not a complete gzip file"):
        task.build(one_source(data=str(tmp_path)), 1)


def of_subsets(folder: Path) -> Path:
    """A copy of a data set with two configurations, as on the hub."""
    for subset, split in (("main", "train"), ("main", "test"), ("socratic", "train"), ("socratic", "test")):
        path = folder / subset / f"{split}-00000-of-00001.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"{subset} {split} {number}", "answer": "1"} for number in range(3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("more", [{"held_out": 0.0}, {"evaluation_split": "test"}])
def test_a_subset_is_the_folder_of_its_name(tmp_path: Path, more: dict[str, str]) -> None:
    of_subsets(tmp_path)
    read = task.build(one_source(data=str(tmp_path), subset="socratic", **more), 1, None)
    assert {prompt.text for prompt in read.training} == {f"socratic train {number}" for number in range(3)}
    assert {prompt.text for prompt in read.held_out(None)} <= {f"socratic test {number}" for number in range(3)}


def test_evaluation_on_a_copy_without_subsets_is_as_named(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(ROW)
    of_subsets(tmp_path / "copy")
    source = one_source(data=str(tmp_path / "copy"), subset="main", evaluation=str(tmp_path / "other.jsonl"))
    assert [prompt.text for prompt in task.build(source, 1, None).held_out(None)] == ["x"]


def test_a_subset_that_is_not_there_is_refused(tmp_path: Path) -> None:
    of_subsets(tmp_path)
    with pytest.raises(TaskError, match="no folder of the subset 'nonsense'; folders in it: main, socratic"):
        task.build(one_source(data=str(tmp_path), subset="nonsense", held_out=0.0), 1, None)
    file = tmp_path / "main" / "train-00000-of-00001.jsonl"
    with pytest.raises(TaskError, match="a single file has no subset 'main'"):
        task.build(one_source(data=str(file), subset="main", held_out=0.0), 1, None)
