"""The CPU kernels' part of set-up: compiled now, so that the first start need not."""

from pathlib import Path

from shoal.backend.weights.catalogue import kernels_dir
from shoal.client.cli.progress import Reporter
from shoal.kernels.native_build import NativeBuildError, build_library


def prepare_kernels(cache_root: Path, reporter: Reporter) -> str:
    """Compile the kernels where they are missing; returns where they are, or why there are none."""
    try:
        return str(build_library(kernels_dir(cache_root), reporter.message))
    except NativeBuildError as error:
        return f"none, the slower torch reference will run: {error}"
