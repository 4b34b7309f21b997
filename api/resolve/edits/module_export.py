"""Turns a stored module back into the entries that it was registered with, for its file."""

from collections.abc import Mapping
from typing import Any

from ....schemas.access.keys import shown
from ....schemas.base.edit_sizes import limit_of
from ....schemas.base.errors import MidstreamError
from ....schemas.base.tensors import Tensor
from ....schemas.requests.interventions import FAMILY
from ....schemas.requests.specs import SteeringSpec
from ....schemas.requests.steering import Module
from ....storage.formats.module_files import SHAPES


def entries_of(module: Module, tensors: Mapping[str, Tensor]) -> list[SteeringSpec]:
    """Return the module's entries; registered again, they give the same digest.

    `tensors`: content hash → tensor, for all tensors of the module.

    Raises a 400 for an entry that a file cannot hold: a feature of an autoencoder, an installed op,
    or single heads.
    """
    entries = []
    for index, entry in enumerate(module.entries):
        family = FAMILY[entry.family]
        if family.fields or not SHAPES.keys() >= set(family.tensors):
            detail = (
                f"module {shown(module.name)!r}, entry {index} is {family.written!r} with "
                f"{', '.join(family.fields or family.tensors)}"
            )
            raise MidstreamError(
                "invalid_request", f"{detail}: a file holds vectors and matrices", field="name"
            )
        numbers = {
            number.name: given
            for number, given in zip(family.numbers, entry.numbers, strict=True)
            if given != number.default
        }
        fields: dict[str, Any] = {
            name: tensors[key] for name, key in zip(family.tensors, entry.tensors, strict=True)
        } | numbers
        if entry.scale != 1.0:
            fields["scale"] = entry.scale
        if entry.positions != "all":
            fields["positions"] = entry.positions
        if entry.limit:
            fields["limit"] = limit_of(entry.limit)
        if entry.trigger:
            fields["trigger"] = entry.trigger
        if family.flag:
            fields[family.flag] = True
        layers = entry.layers[0] if len(entry.layers) == 1 else entry.layers
        entries.append(SteeringSpec(layers=layers, hook=entry.hook, op=family.op, **fields))
    return entries
