"""The command lists without torch in a moment, shows, checks, and says what is wrong in one line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flava_tnt.cli import main
from tests.scratch import CALLBACK, make_distribution

COMMAND = [sys.executable, "-m", "flava_tnt.cli"]


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert (captured.err == "") == (code != 2)
    return captured.out if code != 2 else captured.err


LIGHT = [
    ["--help"],
    ["plugins", "--help"],
    ["plugins", "list", "--help"],
    ["plugins", "show", "--help"],
    ["plugins", "check", "--help"],
    ["recipes", "--help"],
    ["recipes", "list", "--help"],
    ["recipes", "show", "--help"],
    ["plugins", "list"],
    ["plugins", "list", "--json"],
    ["recipes", "list"],
    ["recipes", "show", "demo"],
    ["run", "--help"],
]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_listing_and_help_load_no_torch_and_take_under_half_a_second(arguments: list[str]) -> None:
    script = f"""
import sys
from flava_tnt.cli import main
try:
    code = main({arguments!r})
except SystemExit as exit:
    code = exit.code
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {{"torch", "flava_tnt_plugins", "numpy"}}, loaded
sys.exit(code)
"""
    best = float("inf")
    for _ in range(5):
        start = processor_seconds()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        best = min(best, processor_seconds() - start)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        if best < 0.5:
            break
    assert best < 0.5


def processor_seconds() -> float:
    """Time that ended child processes have computed: other work on the machine counts little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_plugins_are_listed_with_owner_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "plugins", "list", "--kind", "parallelism")
    assert "fsdp" in text
    assert "flava-tnt 0.1.0" in text
    assert "throughput" not in text
    rows = json.loads(output_of(capsys, "plugins", "list", "--json", "--kind", "data"))
    assert {row["name"] for row in rows} == {"demo", "shards", "synthetic"}
    assert set(rows[0]) == {"kind", "name", "target", "distribution", "version", "status"}


def test_list_load_finds_what_the_source_does_not_show(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_distribution(
        tmp_path,
        name="acme",
        entry_points="[flava_tnt.callback]\nfails = acme_fails:Quiet\n",
        modules={"acme_fails.py": CALLBACK + "\nraise RuntimeError('at import')\n"},
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def status(*flags: str) -> str:
        rows = json.loads(output_of(capsys, "plugins", "list", "--json", "--kind", "callback", *flags))
        (row,) = [row for row in rows if row["name"] == "fails"]
        return str(row["status"])

    assert status() == "ok"
    assert "RuntimeError: at import" in status("--load")


@pytest.mark.parametrize("name", ["fsdp", "parallelism:fsdp", "flava-tnt/fsdp", "parallelism:flava-tnt/fsdp"])
def test_a_plugin_shows_its_options(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = output_of(capsys, "plugins", "show", name)
    assert "parallelism plugin of flava-tnt 0.1.0" in text
    assert "mesh" in text
    assert "list[int] | None" in text
    assert "Hybrid sharding" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plugins", "show", "fsdpp"], "unknown plugin 'fsdpp'; did you mean fsdp?"),
        (
            ["plugins", "show", "paralelism:fsdp"],
            "unknown kind of plugin 'paralelism'; did you mean parallelism?",
        ),
        (["plugins", "show", "other/fsdp"], "'fsdp' is not registered by other but by flava-tnt 0.1.0"),
        (
            ["plugins", "list", "--kind", "calback"],
            "unknown kind of plugin 'calback'; did you mean callback?",
        ),
        (
            ["plugins", "check", "flava_tn"],
            "no distribution 'flava_tn' registers a plugin; did you mean flava-tnt?",
        ),
        (["recipes", "show", "dmo"], "unknown recipe 'dmo'; did you mean demo?"),
        (["recipes", "show", "demo", "train.max_step=3"], "did you mean train.max_steps?"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    text = output_of(capsys, *arguments, code=2)
    assert text.startswith("error: ")
    assert message in text
    assert text.count("\n") == 1


def test_a_distribution_is_checked_against_the_contract(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "of flava-tnt 0.1.0 keep the contract" in output_of(capsys, "plugins", "check", "Flava_Tnt")
    make_distribution(
        tmp_path,
        name="acme",
        entry_points="""\
            [flava_tnt.callback]
            good = acme_check:Quiet
            old = acme_old:Quiet
            none = acme_check:No
        """,
        modules={"acme_check.py": CALLBACK, "acme_old.py": CALLBACK.replace("= 1\n", "= 0\n")},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = output_of(capsys, "plugins", "check", "acme", code=1)
    assert "ok   callback:good" in text
    assert "FAIL callback:old" in text
    assert "was written for version 0 of the plugin contract" in text
    assert "module acme_check does not define No" in text
    assert "1 of 3 plugins of acme 1.0 keep the contract" in text


def test_recipes_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert "10b_fsdp_ac" in output_of(capsys, "recipes", "list")
    rows = json.loads(output_of(capsys, "recipes", "list", "--json"))
    assert all(row["description"] for row in rows)


def test_a_recipe_shows_its_file_or_all_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "recipes", "show", "demo").startswith("# ")
    resolved = output_of(capsys, "recipes", "show", "demo", "--resolved")
    assert "  size: tiny  # recipes/demo.yaml:" in resolved
    assert "dropout: 0.0  # default" in resolved
    assert "seed: 7  # command line" in output_of(capsys, "recipes", "show", "demo", "seed=7")


def test_a_module_in_the_current_folder_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "loose_module.py").write_text(CALLBACK)
    script = Path(sys.executable).with_name("flava-tnt")
    done = subprocess.run(
        [script, "plugins", "show", "callback:loose_module:Quiet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Does nothing." in done.stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, "plugins", "list"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_command_is_exit_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
