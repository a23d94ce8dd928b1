"""The run folder: whose it is, and what failed first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flava_tnt.errors import UserError
from flava_tnt.recipes.resolve import Resolved, resolve
from flava_tnt.training.run_folder import create_run_folder, first_failure, record_failure, write_json


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    return resolve("demo")


def test_the_recipe_and_the_plugins_are_written(resolved, tmp_path):
    folder = create_run_folder(resolved, str(tmp_path / "deep" / "run"))
    assert resolve(str(folder / "recipe.yaml")) == resolved
    names = {(plugin["kind"], plugin["name"]) for plugin in json.loads((folder / "plugins.json").read_text())}
    assert {("parallelism", "single"), ("callback", "progress")} < names


def test_two_runs_without_a_folder_of_their_own_get_two(resolved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = create_run_folder(resolved, None), create_run_folder(resolved, None)
    assert first != second
    assert first.parent == second.parent == tmp_path / "runs"


def test_a_folder_belongs_to_the_run_that_got_it_first(resolved, tmp_path):
    create_run_folder(resolved, str(tmp_path))
    with pytest.raises(UserError, match="holds a run already"):
        create_run_folder(resolved, str(tmp_path))


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_ended_before_its_first_step_gives_its_folder_up(resolved, tmp_path, status):
    folder = create_run_folder(resolved, str(tmp_path))
    record_failure(folder, 0, ValueError("of the run before"), 1)
    write_json(folder / "summary.json", {"status": status, "steps": 0})
    assert create_run_folder(resolved, str(tmp_path)) == folder
    assert first_failure(folder) is None
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize("summary", [{"steps": 3}, {}], ids=["some", "unknown"])
def test_a_run_that_may_have_taken_steps_keeps_its_folder(resolved, tmp_path, summary):
    """A rank that was killed says nothing of its steps."""
    folder = create_run_folder(resolved, str(tmp_path))
    write_json(folder / "summary.json", {"status": "failed", **summary})
    with pytest.raises(UserError, match="holds a run already"):
        create_run_folder(resolved, str(tmp_path))


def test_the_first_failure_is_the_earliest_one(tmp_path):
    (tmp_path / "logs").mkdir()
    assert first_failure(tmp_path) is None
    record_failure(tmp_path, 1, ValueError("the cause"), 1)
    record_failure(tmp_path, 0, RuntimeError("connection closed"), 1)
    found = first_failure(tmp_path)
    assert found is not None
    assert (found["rank"], found["message"]) == (1, "ValueError: the cause")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = Path(tmp_path / "x.json")
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
