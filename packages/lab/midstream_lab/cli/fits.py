"""What `fit` does with modules and Jacobian lenses: learns them from a file of examples."""

from typing import Any, Unpack

from midstream.client.cli import options
from midstream.client.cli.terminal import Connector, first_model
from midstream.client.sdk.client import Client
from midstream.schemas.artifacts.jacobian_lenses import JacobianLens

from ..client.fields import LensFitOptions, ModuleFitOptions
from ..records.fits import FitResult

#: Columns of a training file of a module: a line has one of the sides, both, or the last two.
_OF_MODULES = ("positive", "negative", "prompt", "target")


def module(
    connect: Connector, name: str, file: str, /, **fields: Unpack[ModuleFitOptions]
) -> FitResult:
    """Learn a module, and register it if it works on held-out examples. A line of the file has
    `positive` and `negative`, or one of them, or `prompt` and `target`.
    """
    lines = options.rows(file, _OF_MODULES, required=False)
    sides = {
        side: [line[side] for line in lines if side in line] for side in ("positive", "negative")
    }
    sides["examples"] = [line for line in lines if "target" in line]
    return connect().fit_module(None, **_named(connect(), name, {**fields, **sides}))


def lens(
    connect: Connector, name: str, file: str, /, **fields: Unpack[LensFitOptions]
) -> JacobianLens:
    """Compute a Jacobian lens from a corpus, and register it. A line of the file has `text`."""
    prompts = [
        row["text"] for row in options.rows(file, options.TEXT, required=False) if "text" in row
    ]
    return connect().fit_lens(None, **_named(connect(), name, {**fields, "prompts": prompts}))


def _named(client: Client, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "model": fields.pop("model", None) or first_model(client), **fields}
