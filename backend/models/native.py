"""Models on the native CPU kernels: which can run there, and their form there."""

from shoal.backend.models.any_config import AnyConfig
from shoal.backend.models.build import AnyModel
from shoal.backend.models.decoder import Decoder
from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.models.native_gemma4 import NativeGemma4
from shoal.kernels.native_library import NativeLibrary

NativeModel = NativeDecoder | NativeGemma4


def missing_ops(config: AnyConfig, has_packed_experts: bool = False) -> str | None:
    """What a model needs and the native kernels lack; None if they can run it."""
    if config.experts is not None and has_packed_experts:
        return "products with packed experts"
    return None


def make_native(model: AnyModel, library: NativeLibrary) -> NativeModel:
    """Takes the weights out of ``model``, which cannot run afterwards."""
    if isinstance(model, Decoder):
        return NativeDecoder(model, library)
    return NativeGemma4(model, library)
