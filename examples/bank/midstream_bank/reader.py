"""The reader `bank`, on ranks."""

import numpy as np

from midstream.schemas.extensions import Option, Rows

from . import MOST


class Cosines:
    """The cosine of rows with each direction of a bank."""

    returns = {"cosine": "float32"}
    row_bytes = 4 * MOST
    options = {"bank": Option(default="", artifact="banks", about="name of a registered bank")}

    def read(self, rows: Rows) -> dict[str, np.ndarray]:
        """`[sites, positions, directions]`, in the order of the bank's labels."""
        held = np.stack(list(rows.sites.values()))  # [sites, positions, hidden]
        bank = rows.options["bank"] or {"units": b""}
        units = np.frombuffer(bank["units"], dtype="<f4").reshape(-1, held.shape[-1])
        norm = np.maximum(np.linalg.norm(held, axis=-1, keepdims=True), 1e-12)
        return {"cosine": ((held / norm) @ units.T).astype(np.float32)}
