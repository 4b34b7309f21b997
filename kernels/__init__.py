"""Ops that run at a hook site inside the model's forward pass: `midstream::pair_site` and
`midstream::single_site`.

If the repository's root is on the path, this folder can also be imported as `kernels`, the name of
a Hugging Face package that transformers looks for. Then the module defines nothing, so that the ops
are not registered twice.
"""

if __name__ == "midstream.kernels":
    from .ops import idle_sites as idle_sites
    from .ops import pair_site as pair_site
    from .ops import single_site as single_site
    from .ops import sites_idle as sites_idle
