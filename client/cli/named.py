"""What verbs of the command line do with modules and probes beside the calls of the client."""

from typing import Any

import numpy as np

from ...schemas.base.errors import Translated, invalid
from ...schemas.requests.steering import ModuleView
from . import options
from .kinds import write_result
from .terminal import Connector


def put_module(connect: Connector, name: str, /, *files: str, **fields: Any) -> ModuleView:
    return connect().modules.put(name, options.steering(files, "FILE"), **fields)


def export_module(connect: Connector, name: str, path: str, /, **fields: Any) -> str:
    return f"{name} written to {path} as {connect().modules.export(name, path, **fields)}"


def put_probe(connect: Connector, name: str, file: str = "", /, **fields: Any) -> Any:
    """Register the weights of a `.npz` file with `weight` [k, hidden] and, optionally, `bias`."""
    if file:
        allowed = "a .npz file with `weight` and, optionally, `bias`"
        # numpy parses a file's header as a Python literal, which can raise many kinds of errors
        with (
            Translated(
                Exception, lambda error: invalid("FILE", f"{file}: {error}", allowed=allowed)
            ),
            np.load(file, allow_pickle=False) as arrays,
        ):
            fields |= {key: np.array(arrays[key]) for key in ("weight", "bias") if key in arrays}
        if "weight" not in fields:
            raise invalid("FILE", f"{file} has no array `weight`")
    return connect().probes.put(name, **fields)


def export_probe(connect: Connector, name: str, path: str = "-", /, **fields: Any) -> str:
    """Write what is known of a probe, such as its ROC curve."""
    return write_result(connect().probes.get(name, **fields), name, path)
