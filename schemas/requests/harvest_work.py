"""Parts of a harvest as jobs and ranks get them: a range of units, and the place of a sequence's
rows.

See `schemas.harvests`.
"""

from typing import Literal

from ..base.records import Record

#: The consumer of rows that become shards; users cannot name it.
HARVEST = "harvest"

#: Shards whose sequences a worker has in the engine at a time, of all harvests: that many are in
#: each rank's memory.
SHARDS_AT_ONCE = 3

#: `int8` and `float8_e4m3fn`: value = stored × the row's `scale`, whose largest value is the
#: dtype's largest.
ShardDType = Literal["model", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
#: dtype with a scale per row → its largest value.
SCALED: dict[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}


class HarvestPart(Record, omit_defaults=True):
    """Work of a job of kind `harvest`: units `[first, first + count)`; or it plans, or seals."""

    harvest: str
    part: int
    role: Literal["plan", "run", "seal"] = "run"
    first: int = 0
    count: int = 0
    tokens: int = 1  # about: its cost
    tries: int = 0  # jobs of this part before it


class HarvestPlace(Record, omit_defaults=True):
    """Destination of one sequence's rows: travels to the ranks with its capture."""

    uri: str  # of the harvest's store
    key: str  # of the shard, in the folder of its job, without what a stage adds to it
    index: int  # of the sequence in the shard
    sequences: int  # of the shard
    # (document, position in it, first token in the sequence, tokens), ascending
    spans: list[tuple[int, int, int, int]]
    dtype: ShardDType = "model"
    shuffle: int | None = None
    every: int = 1  # of generated tokens
    # with generated tokens: the positions of the prompt that give rows; null: all that were
    # captured
    prompt: list[int] | None = None
    metadata: dict[str, str] = {}  # of the file
