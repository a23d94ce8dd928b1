"""Which rank a process is, from what launchers set."""

import pytest

from flava_tnt.errors import UserError
from flava_tnt.training.process import World, find_world, first_host, set_rendezvous, tasks_of_nodes


def test_a_plain_start_has_no_place():
    assert find_world({"HOME": "/home/x"}) is None


def test_torchrun_gives_the_place():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find_world(environ) == World(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_half_of_torchruns_variables_are_refused_with_the_missing_ones():
    with pytest.raises(UserError, match="LOCAL_RANK, LOCAL_WORLD_SIZE"):
        find_world({"RANK": "0", "WORLD_SIZE": "2"})


SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
}


def test_srun_gives_the_place_and_the_rendezvous():
    world = find_world(SRUN)
    assert world == World(rank=17, world_size=20, local_rank=1, local_world_size=4)
    environ = dict(SRUN)
    set_rendezvous(environ, world)
    assert environ["MASTER_ADDR"] == "gpu03"
    assert 20_000 <= int(environ["MASTER_PORT"]) < 40_000
    assert environ["RANK"] == "17"


def test_two_steps_of_a_job_meet_on_two_ports():
    ports = set()
    for step in ("0", "1"):
        environ = {**SRUN, "SLURM_STEP_ID": step}
        set_rendezvous(environ, find_world(environ))
        ports.add(environ["MASTER_PORT"])
    assert len(ports) == 2


def test_an_address_that_the_user_set_is_kept():
    environ = {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    set_rendezvous(environ, find_world(environ))
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "1234")


def test_an_interactive_shell_of_srun_is_a_plain_start():
    assert find_world({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("text", "tasks"), [("4", [4]), ("8(x2)", [8, 8]), ("8(x2),4,2(x3)", [8, 8, 4, 2, 2, 2])]
)
def test_tasks_of_nodes(text, tasks):
    assert tasks_of_nodes(text) == tasks


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("rack2-gpu[7]-ib", "rack2-gpu7-ib"),
        ("a-b[1,3]", "a-b1"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host
