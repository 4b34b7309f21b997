"""A harvest's work as sent to jobs (a range of units) and to ranks (the destination of a sequence's
rows). See `schemas.jobs.harvests`.
"""

from typing import Literal

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.records import Record

from ..files.order import CutSpan

#: The most shards that a worker computes at a time, over all harvests; each rank holds their rows
#: in memory.
SHARDS_AT_ONCE = 3

#: `int8` and `float8_e4m3fn`: value = stored × the row's `scale`, chosen so that the row's largest
#: value is stored as the dtype's largest.
ShardDType = Literal["model", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
#: dtype with a scale per row → its largest value.
SCALED: dict[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Survey(Record, omit_defaults=True, kw_only=True):
    """One pass over the rows of a finished harvest: the features of `sae`, or with `against` how
    far the model's predictions, and the features of `sae`, are from those of that harvest.
    """

    uris: list[str]  # of the harvest's store, and of that of `against`
    sae: StoredSae | None = None
    top: int  # examples of each feature
    context: int  # tokens before and after each example
    against: str = ""  # another harvest of the same tokens


class HarvestPart(Record, omit_defaults=True):
    """The work of a job of kind `harvest`. `run`: compute units `[first, first + count)`; `plan`:
    divide the harvest into units; `seal`: complete the harvest; `survey`: read a harvest that has
    succeeded.
    """

    harvest: str
    part: int
    role: Literal["plan", "run", "seal", "survey"] = "run"
    first: int = 0
    count: int = 0
    tokens: int = 1  # estimate: the cost of the job
    tries: int = 0  # earlier jobs of this part
    survey: Survey | None = None


class HarvestPlace(Record, omit_defaults=True):
    """The destination of one sequence's rows, sent to the ranks with its capture."""

    uri: str  # of the harvest's store
    key: str  # of the shard, in the folder of its job, without the suffix of a stage
    index: int  # of the sequence in the shard
    sequences: int  # number of sequences in the shard
    spans: list[CutSpan]  # ascending
    dtype: ShardDType = "model"
    shuffle: int | None = None
    every: int = 1  # keep every n-th generated token
    # if generated tokens are harvested: the prompt positions to keep; null: all that are captured
    prompt: list[int] | None = None
    metadata: dict[str, str] = {}  # of the file
