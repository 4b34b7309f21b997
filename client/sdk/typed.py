"""What packages add to the client, for editors and type checkers: the rows of kinds of jobs and the
facades name these, and nothing here is loaded.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream_harvest.client.calls import Harvests as Harvests
    from midstream_lab.client.doses import Doses as Doses
    from midstream_lab.client.fits import Fits as Fits
    from midstream_lab.client.mapping.map import Mapped as Mapped, over as over
    from midstream_lab.client.patch_study import (
        AsyncPatchStudy as AsyncPatchStudy,
        PatchStudy as PatchStudy,
    )
    from midstream_lab.client.probes import Fit as Fit
    from midstream_lab.client.sweeps import Attributions as Attributions, Sweeps as Sweeps
    from midstream_review.client.calls import Hits as Hits
    from midstream_review.client.replays import Replays as Replays
