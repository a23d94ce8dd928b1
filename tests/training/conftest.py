"""Runs that several tests compare with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flava_tnt.testing import Result, run_recipe

EXAMPLE_SOURCE = Path(__file__).parents[1] / "third_party" / "flava-tnt-example" / "src"
EXAMPLE_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(EXAMPLE_SOURCE), os.environ.get("PYTHONPATH", "")])}
SAMPLE_LOG = "plugins.callback.sample_log.use=flava_tnt_example.sample_log:SampleLog"
SHORT = (
    "train.max_steps=20",
    "train.log_every_steps=1",
    "train.clip_grad_norm=null",
    "batch.global=12",
    "plugins.precision=fp32",
)


@pytest.fixture(scope="session")
def run_short(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Run 20 logged steps of `demo` at a global batch of 12, keeping the sample ids of every step."""

    def run(*overrides: str, nproc: int = 1, **options) -> Result:
        return run_recipe(
            "demo",
            *SHORT,
            SAMPLE_LOG,
            *overrides,
            nproc=nproc,
            run_dir=tmp_path_factory.mktemp("runs") / "run",
            environment=EXAMPLE_ENVIRONMENT,
            **options,
        )

    return run


@pytest.fixture(scope="session")
def alone(run_short: Callable[..., Result]) -> Result:
    """The oracle: one process."""
    return run_short()
