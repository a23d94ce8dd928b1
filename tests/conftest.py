"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# On a CI machine the same examples every time: a run says something about the change, not about luck.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
