"""`midstream.lens`, in the style of TransformerLens."""

from . import ops as ops
from .cache import ActivationCache as ActivationCache, NotServed as NotServed
from .logits import Logits as Logits
from .model import Config as Config, HookedModel as HookedModel
from .ops import Op as Op

__all__ = ["ActivationCache", "Config", "HookedModel", "Logits", "NotServed", "Op", "ops"]
