"""The readers of a rank: for each kind of reading, what computes it on the loaded model, or the
reason why it is not served.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ....schemas.readings.features import StoredFeatures
from ....schemas.readings.installed import StoredReader
from ....schemas.readings.lens import StoredLens
from ....schemas.readings.stored import StoredReading
from ..hooks.output_head import NoHeadError, OutputHead
from .features import FeatureReader
from .installed_readers import InstalledReaders, LoadedReader
from .logit_lens import LensReader
from .readings import Reader
from .tuned_lenses import TunedMaps

if TYPE_CHECKING:
    from ..hooks.architectures import Adapter

_STAGES = (
    "the output matrix is on the last pipeline stage alone, out of reach of the "
    "layers of other stages"
)


def readers_of(
    model: nn.Module,
    adapter: "Adapter",
    *,
    dtype: torch.dtype,
    device: torch.device,
    stages: int,
    sites: Collection[tuple[str, int]],
    reduce: Callable[[torch.Tensor], torch.Tensor],
    lens_dir: str,
    installed: Mapping[str, LoadedReader] | None = None,
) -> tuple[dict[type, Reader], dict[str, str]]:
    """Return (type of reading → its reader, kind of reading → why it is not served; empty: it is).

    `reduce`: the sum over the ranks of the stage. `sites`: (hook, layer) whose features this rank
    reads. `lens_dir`: the folder with the tuned lenses. `installed`: by name.
    """
    readers: dict[type[StoredReading], Reader] = {
        StoredReader: InstalledReaders(installed or {}),
        StoredFeatures: FeatureReader(sites, device),
    }
    refused = {}
    try:
        if stages > 1:
            raise NoHeadError(_STAGES)
        with torch.inference_mode():
            head = OutputHead(model, adapter, dtype, device)
    except Exception as error:  # an unusual model is served without a lens
        refused["lens"] = str(error) or type(error).__name__
    else:
        readers[StoredLens] = LensReader(head, reduce, TunedMaps(lens_dir))
    return readers, {str(kind.__struct_config__.tag): "" for kind in readers} | refused
