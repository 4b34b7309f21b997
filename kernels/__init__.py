"""Ops that run at a hook site inside the model's forward pass: `midstream::pair_site` and
`midstream::single_site`.

From the repository's root this folder can also be imported as `kernels`, the name of a package of
Hugging Face's that transformers looks for; then it is empty, and registers no op a second time.
"""

if __name__ == "midstream.kernels":
    from .ops import idle_sites as idle_sites
    from .ops import pair_site as pair_site
    from .ops import single_site as single_site
    from .ops import sites_idle as sites_idle
