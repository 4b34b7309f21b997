"""Checks for secrets: whether other accounts can read a secret's file, and whether a secret was
published.
"""

import hashlib
import os
import stat
from pathlib import Path

#: SHA-256 of secrets that were in the repository, in `deploy/kubernetes/{cpu,gpu}/secrets`.
BURNT = frozenset(
    {
        "e0daf0c8f779b7a5754beeb40a83f7d640997691ee17ff0dd7f8177b6e1c9a9f",
        "15359a3dab9cae3dd0f5a2b3b67312ca3dbfb61b7c0fca474239a664c815f24d",
        "e76af115a0de0165d6d49158749cbda02d9bcb5602ded62ab85f207899ab599e",
        "11c0629de8bbc489a3f11c0e4f2d964afc61f5e7b11ef16b6327de7a0494a437",
        "fc3164634ee754e15a3c4357da22c243b034524f834a2c3766372c9e185569ad",
        "ef271bcae0fb27f9b42b985ea3b0c9f243cf937c36d0822c83595ad2319575d8",
        "fd9221456ca185848a1ac9e0a3603fc18f62c8ad131a28abfee02af7097b31f7",
        "5135f1cd571d87d5460eaea764764f1d1fabf158c0e8f7f157c6eced619e12e2",
    }
)


def is_burnt(secret: str) -> bool:
    return hashlib.sha256(secret.strip().encode()).hexdigest() in BURNT


def is_exposed(path: Path) -> bool:
    """Return whether every account of this machine can read the file, by its own mode and those of
    all folders above.

    A file on a read-only file system does not count: that is how containers get their secrets, and
    they have no other accounts.
    """
    if os.name != "posix":  # on other systems, modes do not show who may read
        return False
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) or not mode & stat.S_IROTH or os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)
