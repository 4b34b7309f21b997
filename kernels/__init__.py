"""Ops at a hook site in the forward pass: `reference` in PyTorch, `triton_site` in Triton.

They are `midstream::pair_site` and `midstream::single_site`. If the repository's root is on the
path, this folder can also be imported as `kernels`, the name of a Hugging Face package that
transformers looks for. Then the module defines nothing, so that the ops are not registered twice.
"""

if __name__ == "midstream.kernels":
    from .ops import (
        IDLE as IDLE,
        STREAM as STREAM,
        WHOLE as WHOLE,
        family as family,
        in_family as in_family,
        pair_site as pair_site,
        single_site as single_site,
    )
