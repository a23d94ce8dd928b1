"""What cannot work on these ranks and devices is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from flava_tnt.errors import PluginError, RecipeError
from flava_tnt.plugin import Setup
from flava_tnt.recipes import memory
from flava_tnt.recipes.resolve import check_setup, resolve
from tests.recipes.test_resolve import HERE, RUNNABLE

GIB = 2**30


def check(
    recipe: str, *overrides: str, ranks: int = 1, device: str = "cpu", gib: float | None = None
) -> Setup:
    return check_setup(
        resolve(recipe, overrides),
        world_size=ranks,
        local_world_size=ranks,
        device_type=device,
        device_memory_bytes=None if gib is None else int(gib * GIB),
    )


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_recipe_fits_two_cpu_ranks_at_size_tiny(name: str) -> None:
    overrides = ["model.size=tiny"] + (["plugins.parallelism=ddp"] if name == "demo" else [])
    setup = check(name, *overrides, ranks=2)
    assert setup.one("parallelism") is not None


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (
            ["batch.global=7"],
            2,
            "command line: batch.global: 2 ranks cannot share 7 samples evenly; take 6 or 8",
        ),
        (
            ["batch.global=1"],
            2,
            "batch.global: 2 ranks cannot share 1 samples evenly; take 2, or other ranks",
        ),
        (
            ["batch.local=6", "batch.micro=4"],
            2,
            "batch.micro: micro-batches of 4 do not divide the 6 samples of each",
        ),
        (
            ["batch.local=2", "batch.micro=4"],
            1,
            "batch.micro: micro-batches of 4 do not divide the 2 samples",
        ),
        (["model.num_heads=5"], 1, "command line: model.num_heads: 5 heads do not divide the hidden size 64"),
        (
            ["loss.weights.mim=0", "train.modalities.image=0.5"],
            1,
            "train.modalities.image: 0.5 of the steps have batches of modality 'image'",
        ),
        (["model.patch_size=7"], 1, "command line: model.patch_size: "),
        (["text.length=513"], 1, "command line: text.length: 513 tokens are more than the 512 positions"),
        (
            ["plugins.parallelism=null"],
            1,
            "plugins.parallelism: a recipe needs a plugin of this kind; there are: ddp",
        ),
        (["plugins.data=null"], 1, "plugins.data: a recipe needs a plugin of this kind"),
    ],
)
def test_what_does_not_fit_together_is_one_line_with_its_origin(
    overrides: list[str], ranks: int, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        check("demo", "plugins.parallelism=ddp", *overrides, ranks=ranks)
    assert message in str(caught.value)
    assert str(caught.value).startswith("command line: ")
    assert "\n" not in str(caught.value)


def test_batch_local_and_micro_that_divide_are_taken() -> None:
    setup = check("demo", "plugins.parallelism=ddp", "batch.local=6", "batch.micro=3", ranks=2)
    assert (setup.recipe.global_batch(2), setup.recipe.micro_batch(2)) == (12, 3)


def test_a_plugin_that_needs_another_says_which() -> None:
    need = f"plugins.callback.n.use={HERE}:NeedsFull"
    with pytest.raises(
        PluginError, match="requires activation_checkpointing:full, which this recipe does not use"
    ):
        check("demo", need)
    check("demo", need, "plugins.activation_checkpointing=full")


def test_two_plugins_that_conflict_are_both_named() -> None:
    conflict = f"plugins.callback.h.use={HERE}:HatesFsdp"
    with pytest.raises(
        PluginError, match=r"HatesFsdp.* cannot work beside parallelism:fsdp \(command line\)"
    ):
        check("demo", conflict, "plugins.parallelism=fsdp")
    check("demo", conflict)


def test_what_a_plugin_s_own_check_finds_gets_its_origin() -> None:
    with pytest.raises(RecipeError) as caught:
        check("demo", f"plugins.callback.picky={{use: '{HERE}:Picky', wish: 3}}")
    assert str(caught.value) == "command line: plugins.callback.picky.wish: 1 ranks are not to my taste"


# --------------------------------------------------------------------------------------------- memory


def test_the_need_comes_from_exact_counts_and_shards() -> None:
    setup = check("350m_ddp", ranks=2, device="cuda")
    need = memory.memory_need(setup)
    trainable, frozen = 303_859_063, 53_786_240  # measured, flava-facts
    assert (need.parameters, need.gradients) == (4 * trainable, 4 * trainable)
    assert (need.optimizer_state, need.codebook) == (8 * trainable, 4 * frozen)
    shared = memory.memory_need(check("350m_fsdp", ranks=2, device="cuda"))
    assert shared.parameters == 4 * -(-trainable // 2)
    assert shared.codebook == need.codebook
    hybrid = check("350m_fsdp", "plugins.parallelism.mesh=[2, 2]", ranks=4, device="cuda")
    assert memory.memory_need(hybrid) == shared


def test_a_model_that_does_not_fit_is_refused_with_what_to_try() -> None:
    with pytest.raises(RecipeError) as caught:
        check("10b_fsdp_ac", ranks=2, device="cuda", gib=40)
    text = str(caught.value)
    assert text.startswith("recipes/10b_fsdp_ac.yaml:")
    assert "10b on 2 ranks needs 75.7 GiB for each rank (parameters 18.9 GiB, gradients 18.9 GiB" in text
    assert "optimizer state 37.8 GiB, frozen codebook 0.2 GiB" in text
    assert "40.0 GiB are there; try at least 4 ranks with as much memory each" in text
    assert "model.size=4.8b, the largest that fits here" in text


def test_the_ranks_that_are_proposed_are_enough_and_no_fewer_are() -> None:
    check("10b_fsdp_ac", ranks=4, device="cuda", gib=40)
    with pytest.raises(RecipeError, match="on 3 ranks needs"):
        check("10b_fsdp_ac", ranks=3, device="cuda", gib=40)


def test_a_parallelism_that_shards_is_proposed_where_none_does() -> None:
    with pytest.raises(RecipeError, match="try a parallelism that shards, on at least 2 ranks with as much"):
        check("900m_ddp", "model.size=1.8b", ranks=4, device="cuda", gib=20)


def test_nothing_is_proposed_that_cannot_help() -> None:
    with pytest.raises(RecipeError, match="try a machine with more memory"):
        check("350m_ddp", ranks=1, device="cuda", gib=0.01)


def test_an_unknown_amount_of_gpu_memory_is_no_reason_to_refuse() -> None:
    check("10b_fsdp_ac", ranks=2, device="cuda")


def test_on_a_cpu_local_ranks_share_the_machine_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 12 * GIB)
    check("350m_ddp", ranks=2)
    with pytest.raises(RecipeError, match="and 3.0 GiB are there"):
        check("350m_ddp", ranks=4)


def test_offloaded_state_is_counted_against_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 200 * GIB)
    with pytest.raises(RecipeError, match="10b on 1 rank needs"):
        check("10b_fsdp_ac", device="cuda", gib=40)
    check("10b_fsdp_ac", "plugins.parallelism.cpu_offload=true", device="cuda", gib=40)


def write_cgroup(root: Path, folder: str, files: dict[str, str]) -> None:
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)


def write_membership(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_a_control_group_s_limit_counts_also_that_of_a_parent(tmp_path: Path) -> None:
    write_membership(tmp_path, "0::/job/task\n")
    write_cgroup(tmp_path, "job/task", {"memory.max": "max\n", "memory.current": "5\n"})
    write_cgroup(
        tmp_path,
        "job",
        {
            "memory.max": f"{2 * 2**20}\n",
            "memory.current": f"{2**20}\n",
            "memory.stat": "anon 7\ninactive_file 1000\n",
        },
    )
    assert memory.host_bytes(tmp_path) == 2**20 + 1000


def test_a_control_group_of_version_1_counts(tmp_path: Path) -> None:
    write_membership(tmp_path, "9:name=systemd:/\n4:memory:/job\n0::/\n")
    write_cgroup(
        tmp_path,
        "memory/job",
        {"memory.limit_in_bytes": f"{3 * 2**20}\n", "memory.usage_in_bytes": f"{2**20}\n"},
    )
    unlimited = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "1\n"}
    write_cgroup(tmp_path, "memory", unlimited)
    assert memory.host_bytes(tmp_path) == 2 * 2**20


def test_without_control_groups_the_system_s_memory_counts(tmp_path: Path) -> None:
    assert memory.host_bytes(tmp_path) > 2**20


def test_a_refusal_takes_a_moment_and_loads_no_torch() -> None:
    script = """
import sys
from flava_tnt.errors import UserError
from flava_tnt.recipes import memory
from flava_tnt.recipes.resolve import check_setup, resolve
memory.host_bytes = lambda: 2**34
try:
    check_setup(resolve("10b_fsdp_ac"), world_size=1, local_world_size=1, device_type="cpu")
except UserError as error:
    assert "10b on 1 rank needs 151.3 GiB" in str(error), error
    assert "torch" not in sys.modules
    sys.exit(2)
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert time.monotonic() - start < 5
