"""Records and their encoding, errors, limits, dtypes, tensors."""

from .dtypes import (
    DTYPE_OF_FILE as DTYPE_OF_FILE,
    DTYPES as DTYPES,
    ITEM_BYTES as ITEM_BYTES,
    DType as DType,
    RowDType as RowDType,
    narrowed as narrowed,
    widened as widened,
)
from .edit_sizes import EditLimit as EditLimit, EditSizes as EditSizes, limit_of as limit_of
from .errors import (
    NO_FIELD as NO_FIELD,
    STATUS_OF_KIND as STATUS_OF_KIND,
    Excluded as Excluded,
    MidstreamError as MidstreamError,
    Problem as Problem,
    Translated as Translated,
    check_excluded as check_excluded,
    error_of as error_of,
    in_one_line as in_one_line,
    invalid as invalid,
    misfit as misfit,
    refuse as refuse,
    shortened as shortened,
    suggestion as suggestion,
    unknown as unknown,
)
from .records import (
    Plotted as Plotted,
    Published as Published,
    Record as Record,
    Result as Result,
    Wire as Wire,
    by_key as by_key,
    from_json as from_json,
    from_msgpack as from_msgpack,
    json_or_text as json_or_text,
    learn_records as learn_records,
    now as now,
    to_json as to_json,
    to_msgpack as to_msgpack,
)
from .states import (
    ENDS as ENDS,
    TERMINAL as TERMINAL,
    TRANSITIONS as TRANSITIONS,
    CallbackEvent as CallbackEvent,
    State as State,
)
from .tensors import (
    NumbersOrTensor as NumbersOrTensor,
    Tensor as Tensor,
    content_hash as content_hash,
    from_numpy as from_numpy,
    pack_numbers as pack_numbers,
    to_numpy as to_numpy,
)
from .version import __version__ as __version__
