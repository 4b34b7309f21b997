"""What runs inside the model's forward at a hook site: the torch ops `midstream::pair_site` and `midstream::single_site`."""

from .ops import pair_site as pair_site
from .ops import single_site as single_site
