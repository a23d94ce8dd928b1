"""What a machine has, from what the driver's command answers."""

import pytest

from flava_tnt.training.devices import Devices, read_free_bytes, visible

MIB = 2**20


def test_free_memory_is_read_in_mib():
    assert read_free_bytes("40000\n39000\n") == (40000 * MIB, 39000 * MIB)


@pytest.mark.parametrize(("chosen", "expected"), [(None, (1, 2, 3)), ("2,0", (3, 1)), ("1", (2,))])
def test_visible_devices_are_taken_in_their_order(chosen, expected):
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible((1, 2, 3), environ) == expected


def test_only_the_devices_that_a_run_uses_are_looked_at():
    assert Devices("cuda", 3, (20, 10, 1)).memory_of(2) == 10
    assert Devices("cpu", 1).memory_of(2) is None
