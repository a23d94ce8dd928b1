"""Plugins are found without being imported, never by install order, and fail with their owner's name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flava_tnt.contract import contract_faults
from flava_tnt.errors import PluginError
from flava_tnt.health import find_fault
from flava_tnt.plugin import KINDS
from flava_tnt.registry import PluginEntry, list_plugins, load_plugin
from tests.scratch import CALLBACK, make_distribution


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on the path; what a test imports from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if path.startswith(str(tmp_path)):
            del sys.modules[name]


def only(kind: str, name: str) -> PluginEntry:
    (entry,) = [entry for entry in list_plugins(kind) if entry.name == name]
    return entry


def add(folder: Path, source: str, *, module: str = "acme_plugins", attribute: str = "Quiet") -> None:
    make_distribution(
        folder,
        name="acme-plugins",
        entry_points=f"[flava_tnt.callback]\nquiet = {module}:{attribute}\n",
        modules={f"{module.replace('.', '/')}.py": source},
    )


def test_listing_imports_no_plugin_and_says_where_each_comes_from(scratch: Path) -> None:
    add(scratch, CALLBACK + "\nraise RuntimeError('imported')\n")
    entry = only("callback", "quiet")
    assert (entry.distribution, entry.version, entry.target, entry.status) == (
        "acme-plugins",
        "1.0",
        "acme_plugins:Quiet",
        "ok",
    )
    assert "acme_plugins" not in sys.modules


def test_all_kinds_come_along_and_are_ok() -> None:
    entries = [entry for entry in list_plugins() if entry.distribution == "flava-tnt"]
    assert {entry.kind for entry in entries} == set(KINDS)
    assert [entry for entry in entries if not entry.is_ok] == []


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("class Quiet(:\n", "broken: acme_plugins.py:1: invalid syntax"),
        (
            "import acme_missing_package\nclass Quiet: pass\n",
            "imports acme_missing_package, which is not installed",
        ),
        ("from acme_missing_package.x import y\nclass Quiet: pass\n", "imports acme_missing_package"),
        ("class Loud: pass\n", "broken: module acme_plugins does not define Quiet"),
        ("try:\n    import acme_missing_package\nexcept ImportError:\n    pass\nclass Quiet: pass\n", "ok"),
        ("def f():\n    import acme_missing_package\nclass Quiet: pass\n", "ok"),
        ("if True:\n    Quiet = 3\n", "ok"),
        ("from json import *\n", "ok"),
        ("import torch\nclass Quiet: pass\n", "ok"),
    ],
)
def test_the_source_shows_what_is_broken(scratch: Path, source: str, status: str) -> None:
    add(scratch, source)
    found = only("callback", "quiet").status
    assert status in found
    assert (found == "ok") == (status == "ok")


def test_a_module_in_a_package_is_checked_without_importing_the_package(scratch: Path) -> None:
    add(scratch, CALLBACK, module="acme.inner.plugins")
    (scratch / "acme/__init__.py").write_text("raise RuntimeError\n")
    (scratch / "acme/inner/__init__.py").write_text("")
    assert only("callback", "quiet").status == "ok"
    (scratch / "acme/__init__.py").write_text("import acme_missing_package\n")
    assert "acme imports acme_missing_package" in only("callback", "quiet").status
    assert "acme" not in sys.modules


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("acme_nowhere:X", "there is no module acme_nowhere"),
        ("flava_tnt.nowhere:X", "there is no module flava_tnt.nowhere"),
        ("json", "not of the form module:attribute"),
        ("", "not of the form module:attribute"),
        ("flava_tnt.plugin:Callback", None),
        ("json.decoder:JSONDecoder.decode", None),
    ],
)
def test_targets_are_checked(target: str, fault: str | None) -> None:
    found = find_fault(target)
    assert found is None if fault is None else fault in str(found)


def test_a_broken_plugin_that_nobody_uses_harms_nothing(scratch: Path) -> None:
    add(scratch, "raise RuntimeError('no')\n")
    plugin, entry = load_plugin("callback", "progress")
    assert (plugin.__name__, entry.distribution) == ("Progress", "flava-tnt")


def test_a_broken_plugin_that_is_used_fails_with_distribution_version_and_error(scratch: Path) -> None:
    add(scratch, CALLBACK + "\nraise RuntimeError('the disk\\nis on fire')\n")
    with pytest.raises(PluginError) as caught:
        load_plugin("callback", "quiet")
    message = str(caught.value)
    assert "acme-plugins 1.0" in message
    assert "RuntimeError: the disk is on fire" in message
    assert "\n" not in message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_entry_point_line_without_a_target_is_broken_not_fatal(scratch: Path) -> None:
    make_distribution(
        scratch, name="acme", entry_points="[flava_tnt.callback]\nnonsense\n[flava_tnt.calback]\nx = y:Z\n"
    )
    assert only("callback", "nonsense").status.startswith("broken: ")
    (unknown,) = [entry for entry in list_plugins() if entry.kind == "calback"]
    assert "did you mean callback?" in unknown.status
    with pytest.raises(PluginError, match="not of the form module:attribute"):
        load_plugin("callback", "nonsense")


def test_two_distributions_with_one_name_are_a_conflict_that_names_both(scratch: Path) -> None:
    for name, module in (("acme-plugins", "acme_plugins"), ("other.plugins", "other_plugins")):
        make_distribution(
            scratch,
            name=name,
            entry_points=f"[flava_tnt.callback]\nquiet = {module}:Quiet\n",
            modules={f"{module}.py": CALLBACK},
        )
    statuses = [entry.status for entry in list_plugins("callback") if entry.name == "quiet"]
    assert len(statuses) == 2
    assert all("acme-plugins 1.0 and other.plugins 1.0" in status for status in statuses)
    with pytest.raises(
        PluginError, match=r"acme-plugins 1\.0 .* and other\.plugins 1\.0 .* choose with"
    ) as caught:
        load_plugin("callback", "quiet")
    assert "acme-plugins/quiet or other.plugins/quiet" in str(caught.value)
    plugin, entry = load_plugin("callback", "Other_Plugins/quiet")  # names compare as PEP 503 says
    assert (plugin.__module__, entry.distribution) == ("other_plugins", "other.plugins")
    with pytest.raises(PluginError, match="not registered by third but by acme-plugins 1.0 and"):
        load_plugin("callback", "third/quiet")


@pytest.mark.parametrize("egg_first", [True, False])
def test_an_editable_install_and_its_egg_info_are_one(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, egg_first: bool
) -> None:
    points = "[flava_tnt.callback]\nquiet = acme_plugins:Quiet\n"
    for number, is_egg in enumerate([egg_first, not egg_first]):
        folder = make_distribution(
            scratch / str(number),
            name="Acme_Plugins" if is_egg else "acme-plugins",
            version="0.9" if is_egg else "1.0",
            entry_points=points,
            egg_info=is_egg,
        )
        monkeypatch.syspath_prepend(str(folder))
    entry = only("callback", "quiet")
    assert entry.version == "1.0"
    assert "conflict" not in entry.status


def test_an_unknown_name_gives_the_nearest_and_the_list() -> None:
    with pytest.raises(
        PluginError, match=r"unknown parallelism plugin 'fdsp'; did you mean fsdp\? there are: ddp"
    ):
        load_plugin("parallelism", "fdsp")


def test_a_name_of_another_kind_is_told_apart() -> None:
    with pytest.raises(PluginError, match="'throughput' is of the kind callback"):
        load_plugin("precision", "throughput")


def test_a_module_and_attribute_work_without_packaging(scratch: Path) -> None:
    (scratch / "loose_module.py").write_text(CALLBACK)
    plugin, entry = load_plugin("callback", "loose_module:Quiet")
    assert plugin(limit=2.0).limit == 2.0
    assert (entry.name, entry.distribution, entry.version) == ("loose_module:Quiet", None, None)


def test_a_module_of_a_known_distribution_has_its_version() -> None:
    _, entry = load_plugin("callback", "flava_tnt_plugins.progress:Progress")
    assert (entry.distribution, entry.version) == ("flava-tnt", "0.1.0")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("loose_nowhere:Quiet", "ModuleNotFoundError: No module named 'loose_nowhere'"),
        ("json:Quiet", "AttributeError"),
        ("json:dumps", "is not a plugin: it must be a class derived from flava_tnt.plugin.Callback"),
        ("json:JSONDecoder", "JSONDecoder is not a plugin"),
        ("flava_tnt_plugins.single:Single", "a plugin of the kind parallelism, not callback"),
        ("json:", "not of the form module:attribute"),
        ("a b:c", "not of the form module:attribute"),
    ],
)
def test_what_is_no_plugin_of_the_kind_is_refused(use: str, message: str) -> None:
    with pytest.raises(PluginError, match=message.replace("(", r"\(")):
        load_plugin("callback", use)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "states no api_version; write `api_version = 1`"),
        ("api_version = 2", "was written for version 2 of the plugin contract, this is version 1"),
        ("api_version = None", "states no api_version"),
    ],
)
def test_another_version_of_the_contract_is_refused(scratch: Path, line: str, message: str) -> None:
    add(scratch, CALLBACK.replace("api_version = 1", line))
    with pytest.raises(PluginError) as caught:
        load_plugin("callback", "quiet")
    assert message in str(caught.value)
    assert "acme-plugins 1.0" in str(caught.value)


def test_a_subclass_does_not_inherit_the_version_it_was_written_for(scratch: Path) -> None:
    (scratch / "loose_module.py").write_text(
        "from flava_tnt_plugins.progress import Progress\nclass Mine(Progress):\n    '''Mine.'''\n"
    )
    with pytest.raises(PluginError, match="Mine states no api_version"):
        load_plugin("callback", "loose_module:Mine")


def test_a_distribution_installed_while_we_run_is_seen(scratch: Path) -> None:
    assert "quiet" not in {entry.name for entry in list_plugins("callback")}
    add(scratch, CALLBACK)
    assert only("callback", "quiet").is_ok


# ------------------------------------------------------------------------------------------- contract

FAULTY = '''
from flava_tnt.plugin import Attention, Callback, DataSource
from pydantic import Field


class NoApply(Attention):
    """Forgot the method."""

    api_version = 1


class Undocumented(Callback):
    api_version = 1
    requires = ("fsdp",)

    use: str = "x"
    level: int = "three"
    """A level."""
    bare: int
'''


def test_the_contract_check_names_every_fault(scratch: Path) -> None:
    (scratch / "loose_module.py").write_text(FAULTY)
    no_apply, _ = load_plugin("attention", "loose_module:NoApply")
    undocumented, _ = load_plugin("callback", "loose_module:Undocumented")
    assert contract_faults(no_apply, "attention") == ["the method apply is missing"]
    faults = "\n".join(contract_faults(undocumented, "callback"))
    for expected in (
        "the class has no docstring",
        "the option use is not documented",
        "the option bare is not documented",
        "an option cannot be called use",
        "'fsdp' in requires or conflicts is not of the form kind:name",
        "the default of option level is refused",
    ):
        assert expected in faults
    assert len(faults.splitlines()) == 6


def test_the_plugins_that_come_along_keep_the_contract() -> None:
    for entry in list_plugins():
        if entry.distribution == "flava-tnt":
            plugin, _ = load_plugin(entry.kind, f"flava-tnt/{entry.name}")
            assert contract_faults(plugin, entry.kind) == [], entry
