"""`midstream acl`: users of Redis for the parts of Midstream."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `acl` to `midstream`."""
    app.command("acl")(acl)


#: Where Redis' own files name these users.
SERVER_SETTINGS = {
    "replica": "masteruser replica, masterauth: the content of",
    "sentinel": "sentinel auth-user NAME sentinel, sentinel auth-pass NAME: the content of",
}


def acl(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the files.")] = Path("acl"),
) -> None:
    """Write an ACL file for Redis with one least-privilege user per part of Midstream, and their passwords."""
    from ...broker.ops.acl import ROLES, SERVERS, USERS_FILE, write_users

    write_users(folder)
    print(f"redis: aclfile {(folder / USERS_FILE).resolve()}")
    for role in ROLES:
        print(f"{role}: MIDSTREAM_REDIS_URL=rediss://{role}@HOST:6379/0 MIDSTREAM_REDIS_PASSWORD_FILE={folder / f'{role}.password'}")
    for role in SERVERS:
        print(f"{role}: {SERVER_SETTINGS[role]} {folder / f'{role}.password'}")
