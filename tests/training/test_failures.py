"""How runs end when something is wrong: one clear line, the right exit code, nobody left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from flava_tnt.testing import assert_same_curve, run_recipe

from .conftest import EXAMPLE_SOURCE, SAMPLE_LOG, SHORT


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """The processes whose command line names the run folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(run_dir) in (process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_that_fails_ends_all_and_its_cause_is_printed(run_short, rank):
    start = time.perf_counter()
    result = run_short(
        "plugins.callback.sample_log.fail_at_step=3",
        f"plugins.callback.sample_log.fail_on_rank={rank}",
        "plugins.parallelism=ddp",
        "train.max_steps=100000",
        nproc=2,
        expect_exit_code=1,
        timeout_seconds=120,
    )
    assert time.perf_counter() - start < 90
    assert f"error: rank {rank}: RuntimeError: failed on purpose" in result.output
    assert "Traceback" not in result.output
    assert result.summary["status"] == "failed"
    assert result.summary["error"] == "RuntimeError: failed on purpose"
    assert "failed on purpose" in (result.run_dir / "logs" / f"rank-{rank}.log").read_text()
    assert not processes_of(result.run_dir)


def start_run(run_dir: Path, *overrides: str, nproc: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flava_tnt.recipes.run", "demo", *SHORT, SAMPLE_LOG, *overrides]
    command += ["--nproc", str(nproc), "--run-dir", str(run_dir)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE_SOURCE)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str]) -> None:
    path = run_dir / "metrics.jsonl"
    for _ in range(1200):
        if path.exists() and len(path.read_text().splitlines()) >= steps:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("the run did not get under way")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_stops_all_ranks_after_the_same_step(tmp_path, number):
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "train.max_steps=100000", "plugins.parallelism=ddp", nproc=2)
    try:
        wait_for_steps(run_dir, 3, process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    last = [(run_dir / f"samples-{rank}.jsonl").read_text().splitlines()[-1] for rank in (0, 1)]
    assert {json.loads(line)["step"] for line in last} == {summary["steps"]}
    assert not processes_of(run_dir)


@pytest.mark.parametrize("seconds", [0.2, 5.0])
def test_a_signal_before_the_first_step_stops_too(tmp_path, seconds):
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "train.max_steps=100000", "plugins.parallelism=ddp", nproc=2)
    try:
        while not (run_dir / "logs").exists():
            time.sleep(0.02)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 0, output
        assert "stopped" in output
        assert "Traceback" not in output
        assert not processes_of(run_dir)
    finally:
        end(process, run_dir)


def test_a_signal_to_one_rank_stops_all(tmp_path):
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "train.max_steps=100000", "plugins.parallelism=ddp", nproc=2)
    try:
        wait_for_steps(run_dir, 3, process)
        rank_1 = next(p for p in processes_of(run_dir) if p.environ().get("RANK") == "1")
        rank_1.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"


def test_a_rank_that_is_killed_ends_the_run(tmp_path):
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "train.max_steps=100000", "plugins.parallelism=ddp", nproc=2)
    try:
        wait_for_steps(run_dir, 3, process)
        rank_1 = next(p for p in processes_of(run_dir) if p.environ().get("RANK") == "1")
        rank_1.kill()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert "error: rank 1: ended by SIGKILL (out of memory?)" in output
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    assert not processes_of(run_dir)


def test_two_runs_at_the_same_time_do_not_meet(alone, run_short, tmp_path):
    run_dir = tmp_path / "run"
    other = start_run(run_dir, "plugins.parallelism=ddp", nproc=2)
    try:
        mine = run_short("plugins.parallelism=ddp", nproc=2)
        output, _ = other.communicate(timeout=120)
    finally:
        other.kill()
    assert other.returncode == 0, output
    assert_same_curve(alone, mine)


def refused(*arguments: str, cwd: Path) -> str:
    """Run the command, which must refuse, and return its one line."""
    command = [sys.executable, "-m", "flava_tnt.recipes.run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_folder_that_holds_a_run_is_left_alone(alone, tmp_path):
    before = (alone.run_dir / "metrics.jsonl").read_bytes()
    line = refused("demo", "--run-dir", str(alone.run_dir), cwd=tmp_path)
    assert "holds a run already" in line
    assert (alone.run_dir / "metrics.jsonl").read_bytes() == before


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    line = refused("demo", "--run-dir", str(tmp_path / "file" / "run"), cwd=tmp_path)
    assert "--run-dir" in line


def test_the_10b_recipe_is_refused_within_moments_where_it_does_not_fit(tmp_path):
    start = time.perf_counter()
    line = refused("10b_fsdp_ac", cwd=tmp_path)
    assert time.perf_counter() - start < 5, "it should take a second or two"
    assert "GiB" in line
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_a_plugin_can_use_are_refused(tmp_path):
    line = refused("demo", "plugins.parallelism=single", "--nproc", "2", cwd=tmp_path)
    assert "single" in line


def test_a_loss_that_is_not_finite_ends_the_run_with_its_name(tmp_path):
    result = run_recipe(
        "demo",
        *SHORT,
        "plugins.optimizer={use: adamw, learning_rate: 1e30, warmup_steps: 0}",
        run_dir=tmp_path / "run",
        expect_exit_code=1,
    )
    assert "is nan" in result.output or "is inf" in result.output
    assert "learning_rate" in result.output


def test_a_dry_run_prints_the_recipe_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "flava_tnt.recipes.run", "350m_fsdp", "--dry-run", "model.size=tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert "size: tiny" in done.stdout
    assert not list(tmp_path.iterdir())


def end(process: subprocess.Popen[str], run_dir: Path) -> None:
    """End a launcher and whatever ranks are left."""
    process.kill()
    process.communicate()
    for rank in processes_of(run_dir):
        rank.kill()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.slow), signal.SIGKILL])
def test_ranks_stop_with_their_launcher_however_it_ends(tmp_path, number):
    run_dir = tmp_path / "run"
    process = start_run(run_dir, "train.max_steps=100000", "plugins.parallelism=ddp", nproc=2)
    try:
        wait_for_steps(run_dir, 3, process)
        process.send_signal(number)
        process.wait(timeout=60)
        for _ in range(300):
            if not processes_of(run_dir):
                break
            time.sleep(0.1)
        assert not processes_of(run_dir)
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    finally:
        end(process, run_dir)


def test_files_that_are_missing_are_refused_before_anything_starts(tmp_path):
    assert "vocab.txt: no such file" in refused("demo", "text.tokenizer=vocab.txt", cwd=tmp_path)
    weights = "model.codebook.weights=weights.safetensors"
    assert "weights.safetensors: no such file" in refused("demo", weights, cwd=tmp_path)
    few = "plugins.data.demo.num_samples=5"
    assert "fewer than one global batch" in refused("demo", few, cwd=tmp_path)
    assert "fewer than one global batch" in refused("demo", few, "--dry-run", cwd=tmp_path)
    assert "text.tokenizer: must be given" in refused("demo", "text.tokenizer=null", cwd=tmp_path)
    assert not list(tmp_path.iterdir())


WRAPPERS = '''
from torch import nn
from flava_tnt.plugin import ActivationCheckpointing, Applied

class Renames(ActivationCheckpointing):
    """Wraps a layer under a name of its own."""
    api_version = 1
    def apply(self, model, run):
        name, layer = next(iter(model.layers().items()))
        class Wrapper(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = layer
            def forward(self, *args, **kwargs):
                return self.inner(*args, **kwargs)
        model.replace_layer(name, Wrapper())
        return Applied(verb="Renames wraps", count=1, total=6, target="layers")

class MatchesNothing(ActivationCheckpointing):
    """Finds no layer."""
    api_version = 1
    def apply(self, model, run):
        return Applied(verb="MatchesNothing wraps", count=0, total=6, target="layers")
'''


@pytest.mark.parametrize(
    ("plugin", "message"),
    [("Renames", "renames parameters"), ("MatchesNothing", "MatchesNothing wraps 0 of 6 layers")],
)
def test_a_transform_that_renames_or_matches_nothing_ends_the_run_before_a_step(tmp_path, plugin, message):
    (tmp_path / "wrappers.py").write_text(WRAPPERS)
    run_dir = tmp_path / "run"
    ours = f"plugins.activation_checkpointing=wrappers:{plugin}"
    environment = {"PYTHONPATH": str(tmp_path)}
    result = run_recipe("demo", *SHORT, ours, run_dir=run_dir, environment=environment, expect_exit_code=2)
    assert message in result.output
    assert "Traceback" not in result.output
    assert result.summary["status"] == "failed"
    assert result.summary["steps"] == 0


def make_shard(path: Path, num_samples: int, bad: set[int]) -> None:
    """A tar shard of small pictures, some of which are no pictures."""
    with tarfile.open(path, "w") as shard:
        for index in range(num_samples):
            picture = io.BytesIO()
            Image.new("RGB", (60, 50), (index * 7 % 256, 90, 30)).save(picture, "png")
            data = b"no picture" if index in bad else picture.getvalue()
            for name, content in ((f"{index:04d}.png", data), (f"{index:04d}.txt", b"a shade of red")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                shard.addfile(info, io.BytesIO(content))


def test_bad_samples_are_named_and_counted_and_too_many_end_the_run_on_all_ranks(tmp_path):
    few, many = tmp_path / "few.tar", tmp_path / "many.tar"
    make_shard(few, 40, {3})
    make_shard(many, 40, set(range(20)))
    pairs = "train.modalities={pairs: 1.0, image: 0, text: 0}"
    options = [*SHORT, "train.max_steps=8", pairs, "plugins.parallelism=ddp"]
    skipped = run_recipe(
        "emoji", *options, f"plugins.data.shards.urls={few}", nproc=2, run_dir=tmp_path / "few"
    )
    assert "sample skipped" in skipped.output
    assert "0003" in skipped.output
    assert skipped.summary["bad_samples"] > 0
    ended = run_recipe(
        "emoji",
        *options,
        f"plugins.data.shards.urls={many}",
        nproc=2,
        run_dir=tmp_path / "many",
        expect_exit_code=2,
    )
    assert "samples could not be used, more than train.max_bad_fraction=0.01 allows" in ended.output
    assert not processes_of(ended.run_dir)
