"""A distribution of somebody else's, installed and used from a recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flava_tnt.plugin import Callback
from flava_tnt.registry import import_entry, list_plugins
from flava_tnt.testing import assert_same_curve, check_plugin, run_recipe

DISTRIBUTION = Path(__file__).parent / "third_party" / "flava-tnt-example"
SHORT = ("train.max_steps=4", "train.log_every_steps=1", "batch.global=12")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the distribution is installed, in a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "flava-tnt-example"
    subprocess.run(["cp", "-r", str(DISTRIBUTION), str(source)], check=True)  # building leaves files behind
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return {"PYTHONPATH": str(target)}


def flava_tnt(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flava_tnt.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_is_listed_shown_and_passes_the_checks(environment):
    listed = json.loads(flava_tnt("plugins", "list", "--json", environment=environment).stdout)
    mine = {entry["name"]: entry for entry in listed if entry["distribution"] == "flava-tnt-example"}
    assert mine.keys() == {"last_layers", "loss_alarm", "sample_log"}
    assert {entry["version"] for entry in mine.values()} == {"1.2.3"}
    shown = flava_tnt("plugins", "show", "last_layers", environment=environment)
    assert "num_layers" in shown.stdout
    assert "Layers of each tower that are recomputed" in " ".join(shown.stdout.split())
    checked = flava_tnt("plugins", "check", "flava-tnt-example", environment=environment)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_installed_is_not_active_and_a_recipe_switches_it_on(environment, tmp_path):
    without = run_recipe("demo", *SHORT, run_dir=tmp_path / "without", environment=environment)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "extends: demo\n"
        "plugins:\n"
        "  activation_checkpointing: {use: flava-tnt-example/last_layers, num_layers: 2}\n"
        "  callback: {loss_alarm: {limit: 1.0}}\n"
    )
    using = run_recipe(str(recipe), *SHORT, run_dir=tmp_path / "with", environment=environment)
    assert "LastLayers wraps" not in without.output
    assert "LastLayers wraps 6 of 6 layers" in using.output
    assert "is above 1.00" in using.output
    assert_same_curve(without, using, relative=1e-6)
    plugins = json.loads((using.run_dir / "plugins.json").read_text())
    used = {(p["name"], p["version"]) for p in plugins if p["distribution"] == "flava-tnt-example"}
    assert used == {("last_layers", "1.2.3"), ("loss_alarm", "1.2.3")}


def test_a_wrong_option_of_it_is_refused_with_file_line_and_key(environment, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: demo\nplugins:\n  callback:\n    loss_alarm:\n      limt: 1.0\n")
    result = run_recipe(str(recipe), run_dir=tmp_path / "run", environment=environment, expect_exit_code=2)
    assert f"{recipe}:5: plugins.callback.loss_alarm.limt" in result.output
    assert "did you mean" in result.output
    assert not result.run_dir.exists()


def test_the_plugins_that_come_along_pass_the_authors_checks():
    ours = [entry for entry in list_plugins() if entry.distribution == "flava-tnt"]
    assert len(ours) >= 18
    for entry in ours:
        check_plugin(import_entry(entry), entry.kind)


def test_the_authors_check_names_what_is_missing():
    class Nameless(Callback):
        api_version = 1
        limit: float = 1.0

    with pytest.raises(AssertionError, match="no docstring.*limit is not documented"):
        check_plugin(Nameless, "callback")
