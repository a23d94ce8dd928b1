"""Under torchrun the command joins the ranks that are there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from flava_tnt.testing import Result, assert_same_curve

from .conftest import SHORT


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_agents_with_one_rank_each_have_the_curve_of_one_process(alone, tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]
    command += ["-m", "flava_tnt.recipes.run", "demo", *SHORT, "plugins.parallelism=fsdp"]
    command += ["--run-dir", str(run_dir)]
    agents = [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert (run_dir / "recipe.yaml").exists()
    assert (run_dir / "logs" / "rank-1.log").exists()
    assert_same_curve(alone, Result(0, "", run_dir), relative=1e-4)


def test_a_wrong_recipe_ends_every_rank_with_2(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "flava_tnt.recipes.run", "demo", "batch.global=13", "plugins.parallelism=ddp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert "error: command line: batch.global" in done.stderr
    assert not list(tmp_path.iterdir()), "something was started"
