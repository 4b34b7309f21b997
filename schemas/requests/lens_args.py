"""Request fields of vllm-lens 1.3, and the rows in responses to its clients. Its tensors are in
`lens_vectors`.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from ..base.limits import MAX_LAYER_TEXT, MAX_LAYERS, Index
from ..base.records import Record
from .lens_vectors import MAX_LENS_TEXT, LensVectors

#: Fields that are rejected → what to use instead.
REFUSED = {
    "apply_hooks": (
        "omit it: functions of clients are not run; see steering, patch, capture and readers"
    ),
    "output_qk": "omit it, and capture the hooks q and k",
}


class LensArgs(Record):
    """vllm-lens' `vllm_xargs`.

    Its client writes lists as JSON in a string; lists are also accepted.
    """

    #: Layers whose rows of the residual stream, after all steering, are returned in `activations`;
    #: true: all layers.
    output_residual_stream: (
        Annotated[str, msgspec.Meta(max_length=MAX_LAYER_TEXT)]
        | Annotated[list[Index], msgspec.Meta(max_length=MAX_LAYERS)]
        | bool
        | None
    ) = None
    apply_steering_vectors: (
        Annotated[str, msgspec.Meta(max_length=MAX_LENS_TEXT)] | LensVectors | None
    ) = None
    # only `base64` is valid
    activations_transport: Annotated[str, msgspec.Meta(max_length=16)] | None = None
    skip_reading_prefix_cache: bool | None = None  # no effect: rows are always complete
    apply_hooks: msgspec.Raw | UnsetType = UNSET
    output_qk: msgspec.Raw | UnsetType = UNSET


class LensRows(Record):
    """Captured rows as vllm-lens' clients read them: `[layers, positions, hidden_size]`, layers
    ascending, positions from 0.
    """

    data: str  # base64
    dtype: str  # numpy's dtype of the bytes
    original_dtype: str
    shape: list[int]
