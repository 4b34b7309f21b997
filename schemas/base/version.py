"""The version of this distribution, and that with its build. Imports nothing of Midstream at once,
so that every module can import it.
"""

from functools import cache

__version__ = "0.1.0"


@cache
def full_version() -> str:
    """Return the version with its build, such as `0.1.0+20261130.g1a2b3c4d5`: it tells builds of
    one version apart.
    """
    from .build import build

    commit, date = build()
    return f"{__version__}+{date}.g{commit.replace('-', '.')}" if commit else __version__
