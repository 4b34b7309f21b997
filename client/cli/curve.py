"""How does one make the keys that workers and relay know each other by? `curve new`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...schemas.errors import invalid

curve_app = typer.Typer(no_args_is_help=True, help="Keys that workers and relay know each other by, where they are on several machines.")


def register(app: typer.Typer) -> None:
    """Add `curve …` to `midstream`."""
    app.add_typer(curve_app, name="curve")


@curve_app.command("new")
def curve_new(
    role: Annotated[str, typer.Argument(metavar="relay|worker", help="Whose key it is to be.")],
    name: Annotated[str, typer.Argument(help="Of a worker: its worker_id.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where the files are written.")] = Path("curve"),
) -> None:
    """A new key pair: NAME.key is private and goes to its owner, NAME.pub is public."""
    from ...broker.receipts.curve import new_keys

    roles: dict[str, Literal["relay", "worker"]] = {"relay": "relay", "worker": "worker"}
    if role not in roles:
        raise invalid("role", f"{role!r} is neither of them", allowed="relay, worker")
    private, public = new_keys(roles[role], name, folder)
    if role == "relay":
        said = [
            ("the relay", f"MIDSTREAM_CURVE_SECRET_FILE={private} MIDSTREAM_CURVE_CLIENTS_DIR={folder / 'clients'}"),
            ("every worker", f"MIDSTREAM_CURVE_SERVER_KEY_FILE={public}"),
        ]
    else:
        said = [
            (f"worker {name}", f"MIDSTREAM_WORKER_ID={name} MIDSTREAM_CURVE_SECRET_FILE={private}"),
            ("the relay", f"{public} in its MIDSTREAM_CURVE_CLIENTS_DIR"),
        ]
    for whom, what in said:
        print(f"{whom}: {what}")
