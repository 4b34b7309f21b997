"""CURVE keys of workers and relay on the command line: `curve new`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...schemas.base.errors import invalid

curve_app = typer.Typer(
    no_args_is_help=True,
    help="CURVE keys that authenticate workers and relay to each other across machines.",
)


def register(app: typer.Typer) -> None:
    """Add `curve …` to `midstream`."""
    app.add_typer(curve_app, name="curve")


@curve_app.command("new")
def curve_new(
    role: Annotated[
        str, typer.Argument(metavar="relay|worker", help="Owner of the key: relay or worker.")
    ],
    name: Annotated[str, typer.Argument(help="For a worker: its worker_id.")],
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the files.")] = Path("curve"),
) -> None:
    """Create a key pair: NAME.key is private and goes to its owner, NAME.pub is public."""
    from ...broker.receipts.curve import new_keys

    roles: dict[str, Literal["relay", "worker"]] = {"relay": "relay", "worker": "worker"}
    if role not in roles:
        raise invalid("role", f"unknown role {role!r}", allowed="relay, worker")
    private, public = new_keys(roles[role], name, folder)
    if role == "relay":
        text = [
            (
                "the relay",
                (
                    f"MIDSTREAM_CURVE_SECRET_FILE={private} "
                    f"MIDSTREAM_CURVE_CLIENTS_DIR={folder / 'clients'}"
                ),
            ),
            ("every worker", f"MIDSTREAM_CURVE_SERVER_KEY_FILE={public}"),
        ]
    else:
        text = [
            (f"worker {name}", f"MIDSTREAM_WORKER_ID={name} MIDSTREAM_CURVE_SECRET_FILE={private}"),
            ("the relay", f"{public} in its MIDSTREAM_CURVE_CLIENTS_DIR"),
        ]
    for whom, what in text:
        print(f"{whom}: {what}")
