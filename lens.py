"""The TransformerLens-style facade: `HookedModel`, its cache, and the ops that its hooks take.

See `docs/coming-from.md`.
"""

from .client.lens import ops as ops
from .client.lens.cache import ActivationCache as ActivationCache, NotServed as NotServed
from .client.lens.logits import Logits as Logits
from .client.lens.model import Config as Config, HookedModel as HookedModel
from .client.lens.ops import Op as Op

__all__ = ["ActivationCache", "Config", "HookedModel", "Logits", "NotServed", "Op", "ops"]
