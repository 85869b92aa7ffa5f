"""The version of this build, from the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("p2pshard")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
