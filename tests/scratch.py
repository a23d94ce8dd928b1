"""Makes distributions of plugins on a scratch path, as an installer would leave them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

CALLBACK = '''
from flava_tnt.plugin import Callback


class Quiet(Callback):
    """Does nothing."""

    api_version = 1

    limit: float = 1.0
    """A number."""
'''


def make_distribution(
    folder: Path,
    *,
    name: str,
    entry_points: str,
    modules: dict[str, str] | None = None,
    version: str = "1.0",
    egg_info: bool = False,
) -> Path:
    """Write modules and metadata into ``folder``, which the test puts on ``sys.path``.

    Args:
        entry_points: the text of `entry_points.txt`.
        modules: source by file name, e.g. ``{"acme.py": "..."}``.
        egg_info: metadata as a build leaves it beside the sources, not as an installer writes it.
    """
    for file, source in (modules or {}).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source), encoding="utf-8")
    stem = name.replace("-", "_")
    info = folder / (f"{stem}.egg-info" if egg_info else f"{stem}-{version}.dist-info")
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / ("PKG-INFO" if egg_info else "METADATA")).write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(dedent(entry_points), encoding="utf-8")
    return folder
