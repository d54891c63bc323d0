"""A long session's scores: the same however its prompt comes."""

import pytest
import torch
from text_builders import make_tokenizer
from tiny_checkpoint import write_tiny_checkpoint

from shoal.backend.models.native_decoder import NativeDecoder
from shoal.backend.weights.catalogue import kernels_dir
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import load_native
from shoal.load.scored_session import LoadedSessions, SessionRun, run_session
from shoal.load.session_eviction import policies
from shoal.scheduler.sampling_params import SamplingParams

PROMPT = [(idx * idx + 5 * idx) % 97 + 3 for idx in range(200)]
BUDGET = 64


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedSessions:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    tiny = load_model(folder, torch.float32)
    model = NativeDecoder(tiny.model, load_native(kernels_dir()))
    return LoadedSessions(model, tiny.config, torch.float32, make_tokenizer(), "native")


def run(loaded: LoadedSessions, policy: str, chunk: int, budget: int = BUDGET) -> SessionRun:
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    make = policies(budget)[policy]
    return run_session(loaded, PROMPT, make, max_len=256, sampling=sampling, chunk=chunk)


@pytest.mark.parametrize("policy", ["lru", "window", "attention_sink", "h2o"])
def test_chunks_of_any_size_score_as_single_tokens(loaded: LoadedSessions, policy: str) -> None:
    one_by_one = run(loaded, policy, chunk=1)
    assert len(one_by_one.nll) == len(PROMPT) - 1
    for chunk in (13, 256):
        in_chunks = run(loaded, policy, chunk)
        assert in_chunks.nll == one_by_one.nll
        assert in_chunks.output == one_by_one.output
    most = max(held for _, held in one_by_one.held)
    assert most == (-(-219 // 16) if policy == "lru" else BUDGET // 16)


def test_policies_score_alike_until_the_budget_is_full(loaded: LoadedSessions) -> None:
    runs = [run(loaded, policy, chunk=64) for policy in policies(BUDGET)]
    assert len({tuple(one.nll[:BUDGET]) for one in runs}) == 1
    assert len({tuple(one.nll[BUDGET:]) for one in runs}) == len(runs)
    whole = run(loaded, "h2o", chunk=64, budget=256)
    assert whole.nll == runs[0].nll
