"""Where files are, in a form that does not depend on the working directory."""

from __future__ import annotations

import os


def absolute(path_or_url: str) -> str:
    """A local path made absolute, with ``~`` expanded; a URL (``s3://...``, ``zip://...::...``) as it is.

    A resolved recipe holds paths in this form, so it runs as it is from anywhere.
    """
    if "://" in path_or_url or "::" in path_or_url:
        return path_or_url
    return os.path.abspath(os.path.expanduser(path_or_url))
