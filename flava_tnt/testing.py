"""Checks for plugin authors: the ones that the plugins that come along pass.

::

    from flava_tnt.testing import assert_same_curve, run_recipe

    def test_my_sharding_trains_the_same_model(tmp_path):
        alone = run_recipe("demo", "train.max_steps=5", run_dir=tmp_path / "alone")
        overrides = ["train.max_steps=5", "plugins.parallelism=mine"]
        mine = run_recipe("demo", *overrides, nproc=2, run_dir=tmp_path / "mine")
        assert_same_curve(alone, mine)
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flava_tnt.contract import contract_faults
from flava_tnt.plugin import Plugin

CURVE_FIELDS = ("step", "samples", "modality", "loss", "losses", "learning_rate", "grad_norm")
"""The metrics that a layout of ranks must not change (times and memory may differ)."""


def check_plugin(plugin: type[Plugin], kind: str) -> None:
    """Check a plugin's class against the contract, as `flava-tnt plugins check` does.

    Raises:
        AssertionError: naming everything in which it falls short.
    """
    faults = contract_faults(plugin, kind)
    assert not faults, f"{plugin.__name__}: {'; '.join(faults)}"


@dataclass(frozen=True)
class Result:
    """How a run ended and what it left behind."""

    exit_code: int
    output: str
    """Standard output and standard error."""
    run_dir: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged steps."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))
        return value


def run_recipe(
    recipe: str,
    *overrides: str,
    run_dir: Path,
    nproc: int = 1,
    timeout_seconds: float = 300.0,
    expect_exit_code: int | None = 0,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Run a recipe in processes of its own, as the command does.

    Args:
        recipe: a name or a path.
        overrides: ``KEY=VALUE``.
        run_dir: the run folder to make.
        nproc: ranks.
        timeout_seconds: after which the run is ended.
        expect_exit_code: None: any.
        environment: variables to add.

    Raises:
        AssertionError: the exit code is another one; the message has the output.
        subprocess.TimeoutExpired: it took too long.
    """
    command = [sys.executable, "-m", "flava_tnt.recipes.run", recipe, *overrides]
    command += ["--nproc", str(nproc), "--run-dir", str(run_dir)]
    # One thread a rank: ranks that fight for cores are slow, and sums keep their order.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        process.communicate(timeout=60)
        raise
    result = Result(process.returncode, output, run_dir)
    if expect_exit_code is not None:
        assert result.exit_code == expect_exit_code, (
            f"exit code {result.exit_code}, not {expect_exit_code}: {' '.join(command)}\n{output}"
        )
    return result


def assert_same_curve(
    expected: Result, actual: Result, *, relative: float = 1e-4, ignore: tuple[str, ...] = ()
) -> None:
    """Check that two runs logged the same steps with the same values.

    Args:
        relative: largest relative difference of a number.
        ignore: names of losses or fields to leave out.

    Raises:
        AssertionError: naming step, field, both values and their relative difference.
    """
    first, second = expected.metrics, actual.metrics
    assert [m["step"] for m in first] == [m["step"] for m in second], "other steps were logged"
    for one, other in zip(first, second, strict=True):
        values, others = dict(_curve(one, ignore)), dict(_curve(other, ignore))
        assert values.keys() == others.keys(), f"step {one['step']}: {sorted(values)} and {sorted(others)}"
        for name, value in values.items():
            _assert_close(one["step"], name, value, others[name], relative)


def _curve(metrics: Mapping[str, Any], ignore: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in CURVE_FIELDS:
        if name in ignore:
            continue
        if name == "losses":
            yield from ((f"losses.{k}", v) for k, v in metrics["losses"].items() if k not in ignore)
        else:
            yield name, metrics[name]


def _assert_close(step: int, name: str, expected: Any, actual: Any, relative: float) -> None:
    if not isinstance(expected, float):
        assert actual == expected, f"step {step}: {name} is {actual}, not {expected}"
        return
    difference = abs(actual - expected) / max(abs(expected), 1e-12)
    assert math.isclose(actual, expected, rel_tol=relative, abs_tol=1e-12), (
        f"step {step}: {name} is {actual}, not {expected}: they differ by {difference:.1e} > {relative:.0e}"
    )
