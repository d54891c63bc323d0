"""The engine alone, in this process, under the same closed-loop load: what the path is measured by.

    python load/path_engine.py --streams 32 --requests 96

Prints one JSON object, ``PathResult``.
"""

import random
import time

import msgspec
import typer

from shoal.backend.engine_builder import build_engine
from shoal.backend.engine_config import EngineConfig
from shoal.backend.messages import AddSequence
from shoal.load.path_client import PathResult
from shoal.scheduler.sampling_params import SamplingParams


def main(
    weights: str = "smollm2-135m-instruct",
    dtype: str = "bfloat16",
    streams: int = 32,
    requests: int = 96,
    max_tokens: int = 128,
    prompt_tokens: int = 128,
    seed: int = 0,
) -> None:
    """Keep so many sequences running until all have finished."""
    engine, _ = build_engine(EngineConfig(weights, dtype=dtype), lambda phase, done, total: None)
    draw = random.Random(seed)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=0)
    added, live, num_tokens = 0, 0, 0
    cpu, started = time.process_time(), time.perf_counter()
    while live or added < requests:
        while live < streams and added < requests:
            prompt = draw.choices(range(1000, 40_000), k=prompt_tokens)
            added += 1
            live += 1
            engine.add(AddSequence(added, prompt, prompt_tokens, sampling))
        for output in engine.step():
            num_tokens += output.token is not None
            live -= output.finish_reason is not None
    seconds = time.perf_counter() - started
    used = time.process_time() - cpu
    result = PathResult(seconds, num_tokens, requests, 0, used, 0.0, 0.0, 0.0)
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    typer.run(main)
