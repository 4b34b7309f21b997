"""The commands that this package adds are there, and to show them loads nothing heavy."""

import subprocess
import sys

import typer

from midstream.client.cli import main
from midstream.client.extras import PACKAGED
from midstream_ops.commands import add

#: What only the command that runs may load.
HEAVY = {"torch", "vllm", "transformers", "litestar", "celery", "zmq", "redis"}


def test_the_core_knows_which_commands_this_package_has() -> None:
    app = typer.Typer()
    add(app)
    ours = {name for name, (package, _) in PACKAGED.items() if package == "midstream-ops"}
    assert set(typer.main.get_group(app).commands) == ours


def test_the_installed_package_offers_them_to_the_command_line() -> None:
    group = typer.main.get_command(main.app)
    assert set(PACKAGED) <= set(group.list_commands(typer.Context(group)))  # type: ignore[attr-defined]


def test_to_show_the_commands_loads_nothing_heavy() -> None:
    program = (
        "import sys, midstream_ops.commands; print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    )
    assert set(done.stdout.split()) & HEAVY == set()
