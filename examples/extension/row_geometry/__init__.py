"""How rows of the residual stream grow and turn, and a limit to their length
(docs/extending.md).
"""

import numpy as np

from midstream.schemas.extensions import Option, Rows


class RowGeometry:
    """Norms of rows, their cosine with the row before, and their largest dimensions."""

    returns = {"norm": "float32", "turn": "float32", "dimensions": "int32"}
    row_bytes = 8  # a norm and a cosine
    grows = {"k": 4}  # and so much for each dimension
    options = {"k": Option(default=3, low=1, high=16, about="dimensions of each row")}

    def read(self, rows: Rows) -> dict[str, np.ndarray]:
        """`norm`, `turn`: `[sites, positions]`; `turn` of the first position is 1.

        `dimensions`: `[sites, positions, k]`.
        """
        held = np.stack(list(rows.sites.values()))  # [sites, positions, hidden]
        norm = np.linalg.norm(held, axis=-1)
        unit = held / np.maximum(norm, 1e-12)[..., None]
        turn = np.ones_like(norm)
        turn[:, 1:] = (unit[:, 1:] * unit[:, :-1]).sum(axis=-1)
        dimensions = np.argsort(-np.abs(held), axis=-1, kind="stable")[..., : rows.options["k"]]
        return {
            "norm": norm.astype(np.float32),
            "turn": turn.astype(np.float32),
            "dimensions": dimensions.astype(np.int32),
        }


class NormCap:
    """Rows longer than a limit, made as long as that."""

    options = {"limit": Option(default=1000.0, low=0.0, about="norm, in units of the stream")}

    def edit(self, rows: np.ndarray, vector: None, limit: float) -> np.ndarray:
        """float32 `[n, hidden]`. Shorter rows are returned as they are, bit for bit."""
        norm = np.linalg.norm(rows, axis=-1, keepdims=True)
        return np.where(norm > limit, rows * (limit / np.maximum(norm, 1e-30)), rows).astype(
            np.float32
        )
