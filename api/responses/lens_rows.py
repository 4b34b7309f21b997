"""Formats the rows of a capture like vllm-lens' answers."""

import math
from collections.abc import Sequence
from typing import cast

from ...schemas.base import ITEM_BYTES, DType
from ...schemas.requests.lens_vectors import LensRows, packed as in_json
from . import packed

HOOK = "post_block"


def activations(blobs: Sequence[packed.OpenBlob]) -> dict[str, LensRows]:
    """Return one prompt's rows at `post_block` from all its blobs.

    Raises MidstreamError like `packed.join`; OSError, EOFError.
    """
    manifest = blobs[0].header.manifest
    dtype = cast(DType, manifest.dtype)
    shape = [len(manifest.all_sites[HOOK]), len(manifest.positions), manifest.hidden_size]
    joined = packed.join(blobs, {HOOK: manifest.all_sites[HOOK]})
    raw = b"".join(joined.chunks())
    # the rows come first
    raw = raw[len(joined.head) : len(joined.head) + math.prod(shape) * ITEM_BYTES[dtype]]
    return {"residual_stream": LensRows(**in_json(dtype, shape, raw))}
