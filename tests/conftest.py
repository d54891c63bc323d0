"""Fixtures for all tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from openai_document import FINDINGS

from shoal.backend.engine_config import ConfigError
from shoal.backend.text.tokenizer import Tokenizer
from shoal.backend.weights.catalogue import DEFAULT_MODEL, kernels_dir, resolve_weights
from shoal.kernels.native_library import NativeLibrary, load_native

# A busy machine must not fail a test, and CI must not fail by the luck of a draw.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_PULL = "from shoal.client.cli.app import main; main()"


@pytest.fixture(autouse=True)
def answers_follow_the_document() -> Iterator[None]:
    """Whatever a test got from the OpenAI endpoints is as OpenAI's document has it."""
    yield
    assert not (found := FINDINGS.take()), "\n".join(found)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2 GGUF file from the cache; fetched as ``shoal pull`` does it when missing."""
    try:
        return resolve_weights(DEFAULT_MODEL)
    except ConfigError:
        subprocess.run([sys.executable, "-c", _PULL, "pull", DEFAULT_MODEL], check=True)
        return resolve_weights(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(smollm2_path)


@pytest.fixture(scope="session")
def native() -> NativeLibrary:
    """The CPU kernels, compiled where they are not in the cache."""
    return load_native(kernels_dir())
