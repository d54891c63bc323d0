"""The engine alone against its roofline, memory against its bound: what needs no server."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.load.compare.in_process import EngineLoop, Step, higher
from shoal.load.compare.roofline import ModelShape, Peaks, Run
from shoal.load.engine_roofline import EngineFigures
from shoal.load.memory import Peak, bound, high_water, role_of, served_weights

SHAPE = ModelShape(
    layer_weights=1000,
    output_weights=100,
    num_heads=2,
    num_kv_heads=1,
    head_size=4,
    windows=(None, None),
)
PEAKS = Peaks(1e6, 1e6)
FASTER = Peaks(2e6, 4e6)


class TestEngineFigures:
    def test_decodes_with_all_streams_are_told_apart(self) -> None:
        prefill = Step(0.5, [Run(128, 0), Run(128, 0)], PEAKS)
        mixed = Step(0.3, [Run(1, 128), Run(64, 0, samples=False)], PEAKS)
        partial = Step(0.2, [Run(1, 130)], PEAKS)
        decodes = [
            Step(0.02, [Run(1, 129), Run(1, 129)], PEAKS),
            Step(0.04, [Run(1, 130), Run(1, 130)], FASTER),
        ]
        loop = EngineLoop(2, 50, [prefill, mixed, *decodes, partial])
        figures = EngineFigures.of(loop, SHAPE, "bf16")
        assert figures.tokens_per_s == pytest.approx(50 / 1.06)
        assert figures.decode_ms == pytest.approx(30.0)
        least = [SHAPE.step_seconds(step.runs, "bf16", step.limits) for step in loop.steps]
        assert least[3] < SHAPE.step_seconds(decodes[1].runs, "bf16", PEAKS)
        assert figures.roofline == pytest.approx(50 / sum(least))
        assert figures.decode_roofline == pytest.approx(sum(least[2:4]) / 0.06)

    def test_limits_are_means_over_the_time(self) -> None:
        steps = [Step(0.3, [Run(1, 5)], PEAKS), Step(0.1, [Run(1, 6)], FASTER)]
        limits = EngineFigures.of(EngineLoop(1, 2, steps), SHAPE, "bf16").limits
        assert (limits.read, limits.product) == pytest.approx((1.25e6, 1.75e6))

    def test_of_two_looks_the_higher_counts(self) -> None:
        assert higher(Peaks(1.0, 4.0), Peaks(3.0, 2.0)) == Peaks(3.0, 4.0)


class TestMemory:
    def test_the_bound(self) -> None:
        assert bound(200_000_000, 50_000_000) == 260_000_000 + 50_000_000 + 300_000_000

    def test_weights_as_they_are_served(self, tmp_path: Path) -> None:
        tensors = {
            "model.embed_tokens.weight": torch.zeros(512, 256, dtype=torch.bfloat16),
            "model.layers.0.mlp.up_proj.weight": torch.zeros(1024, 256, dtype=torch.bfloat16),
            "model.norm.weight": torch.zeros(256, dtype=torch.bfloat16),
        }
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({}))
        dense = served_weights(tmp_path, "bf16")
        assert dense == 2 * (512 * 256 + 1024 * 256 + 256)
        assert dense * 0.5 <= served_weights(tmp_path, "int8") < dense * 0.52
        assert dense * 0.25 <= served_weights(tmp_path, "int4") <= dense * 0.32

    def test_the_kernels_count_of_the_highest_size(self) -> None:
        assert high_water("Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  321 kB\n") == 321 * 1024
        assert high_water("Name:\tkthreadd\n") == 0

    @pytest.mark.parametrize(
        ("command", "role"),
        [
            ("python -P -m shoal.backend.worker --socket /tmp/tritonserver/x", "worker"),
            ("/x/triton_python_backend_stub /tmp/shoal tritonserver", "stub"),
            ("/opt/tritonserver/bin/tritonserver --model-repository x", "tritonserver"),
            ("python -m shoal.client.openai --port 1", "OpenAI endpoint"),
            ("python shoal serve", "supervisor and guards"),
        ],
    )
    def test_what_a_process_is(self, command: str, role: str) -> None:
        assert role_of(command.split()) == role

    def test_the_whole_is_the_sum(self) -> None:
        sizes = [700, 20, 3]
        peak = Peak("loaded", dict(zip(("worker", "stub", "other"), sizes, strict=True)))
        assert (peak.worker, peak.whole) == (sizes[0], sum(sizes))
