"""The OpenMP runtime that torch uses, found and shared with the kernels."""

import ctypes
import functools
from pathlib import Path

import torch

from shoal.kernels.native_build import NativeBuildError


@functools.cache
def share_torch_openmp() -> Path:
    """Make the OpenMP runtime that torch uses visible to the kernels; returns its file.

    A second runtime would keep threads of its own, and the two would fight for the cores. Others
    may be loaded too (a wheel often brings one along), so torch's libraries are asked for theirs.
    """
    for name in ("libtorch_cpu.so", "libtorch.so"):
        library = Path(torch.__file__).parent / "lib" / name
        if library.is_file() and (runtime := _file_that_defines("GOMP_parallel", library)):
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
            return runtime
    raise NativeBuildError("torch has no OpenMP runtime (libgomp) here that the kernels could use")


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _file_that_defines(symbol: str, library: Path) -> Path | None:
    """The file in which ``library`` finds ``symbol``: itself or one that it depends on."""
    info = _SymbolInfo()
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(str(library)), symbol), ctypes.c_void_p)
        found = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except (OSError, AttributeError):
        return None
    return Path(info.file.decode()) if found and info.file else None
