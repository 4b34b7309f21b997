"""The TransformerLens-style facade, which `midstream.lens` exports."""
