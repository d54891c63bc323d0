"""The native CPU kernels: close to the reference, and blind to whatever else is in the batch."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from attention_context import MIXED, TOLERANCE, Context, normal, num_threads
from torch.nn import functional

from shoal.backend.weights.catalogue import kernels_dir
from shoal.kernels.native_build import NativeBuildError, build_library, find_compiler
from shoal.kernels.native_library import Epilogue, NativeLibrary, load_native, share_torch_openmp
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rotary_embedding import rotary_angles, rotary_embedding


@pytest.fixture(scope="module")
def native() -> NativeLibrary:
    return load_native(kernels_dir())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestLinear:
    @pytest.mark.parametrize("num_rows", [1, 2, 5, 11, 12, 13, 24, 47, 130, 200])
    @pytest.mark.parametrize(("n", "k"), [(32, 64), (1, 1), (33, 7), (95, 65), (577, 130)])
    def test_close_to_exact(
        self, native: NativeLibrary, dtype: torch.dtype, num_rows: int, n: int, k: int
    ) -> None:
        weight, bias = normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
        states = normal(num_rows, k, seed=3, dtype=dtype)
        out = native.linear(states, native.pack_linear(weight, bias))
        # Inputs are what they are: sums are in float32 for both dtypes.
        exact = functional.linear(states.double(), weight.double(), bias.double())
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5 * k**0.5)

    def test_adds_to_what_is_there(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        weight, states = normal(70, 40, dtype=dtype), normal(17, 40, seed=1, dtype=dtype)
        packed = native.pack_linear(weight)
        before = normal(17, 70, seed=2)
        out = native.linear(states, packed, Epilogue.ADD, before.clone())
        assert torch.equal(out, before + native.linear(states, packed))

    @pytest.mark.parametrize("inner", [1, 16, 23, 112])
    @pytest.mark.parametrize("biased", [False, True])
    def test_gated(
        self, native: NativeLibrary, dtype: torch.dtype, inner: int, biased: bool
    ) -> None:
        gate, up = normal(inner, 48, dtype=dtype), normal(inner, 48, seed=1, dtype=dtype)
        biases = [normal(inner, seed=idx, dtype=dtype) for idx in (5, 6)] if biased else [None] * 2
        states = normal(19, 48, seed=2, dtype=dtype)
        packed = native.pack_gated(gate, up, *biases)
        out = native.linear(states, packed, Epilogue.SILU_MUL, out_features=inner)
        wide = [None if bias is None else bias.double() for bias in biases]
        left = functional.linear(states.double(), gate.double(), wide[0])
        right = functional.linear(states.double(), up.double(), wide[1])
        assert out.dtype == dtype
        expected = functional.silu(left) * right
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])

    @pytest.mark.parametrize(("n", "k"), [(576, 577), (95, 64)])
    def test_a_row_alone_equals_the_row_among_others(
        self, native: NativeLibrary, dtype: torch.dtype, n: int, k: int
    ) -> None:
        packed = native.pack_linear(normal(n, k, dtype=dtype))
        states = normal(420, k, seed=1, dtype=dtype)
        alone = torch.cat([native.linear(row[None], packed) for row in states])
        for count in (1, 2, 3, 7, 12, 13, 25, 64, 130, 193, 420):
            for start in (0, 420 - count):
                rows = slice(start, start + count)
                assert torch.equal(native.linear(states[rows], packed), alone[rows])

    def test_nan_and_infinity_stay_in_their_row(
        self, native: NativeLibrary, dtype: torch.dtype
    ) -> None:
        packed = native.pack_linear(normal(64, 32, dtype=dtype))
        states = normal(13, 32, seed=1, dtype=dtype)
        clean = native.linear(states, packed)
        states[4, 3] = float("nan")
        states[5, 3] = float("inf")
        out = native.linear(states, packed)
        others = [row for row in range(13) if row not in (4, 5)]
        assert bool(out[4].isnan().all())
        assert not bool(out[5].isfinite().any())
        assert torch.equal(out[others], clean[others])


class TestRows:
    @pytest.mark.parametrize("width", [1, 15, 64, 577])
    def test_rms_norm(self, native: NativeLibrary, dtype: torch.dtype, width: int) -> None:
        hidden, weight = normal(9, width) * 3, normal(width, seed=1)
        out = native.rms_norm(hidden, weight, 1e-5, dtype)
        expected = rms_norm(hidden, weight, 1e-5).to(dtype)
        torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
        alone = torch.cat([native.rms_norm(row[None], weight, 1e-5, dtype) for row in hidden])
        assert torch.equal(out, alone)

    @pytest.mark.parametrize("head_dim", [24, 64, 128])
    def test_rotation_and_cache(
        self, native: NativeLibrary, dtype: torch.dtype, head_dim: int
    ) -> None:
        num_heads, num_kv_heads, block_size = 6, 2, 4
        qkv = normal(5, (num_heads + 2 * num_kv_heads) * head_dim)
        positions = torch.tensor([0, 1, 77, 4095, 12])
        slots = torch.tensor([3, 0, 18, 7, 9])
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, head_dim, 2) / head_dim))
        shape = (5, block_size, num_kv_heads, head_dim)
        keys, values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        query = native.rotate_and_write(qkv, positions, inv_freq, slots, keys, values)

        by_head = qkv.view(5, -1, head_dim)
        rotated = rotary_embedding(by_head, rotary_angles(positions, inv_freq, torch.float32))
        close = TOLERANCE[dtype]
        torch.testing.assert_close(query, rotated[:, :num_heads].to(dtype), **close)
        written = keys.flatten(0, 1)[slots]
        torch.testing.assert_close(written, rotated[:, num_heads:-num_kv_heads].to(dtype), **close)
        assert torch.equal(values.flatten(0, 1)[slots], by_head[:, -num_kv_heads:].to(dtype))
        untouched = [slot for slot in range(20) if slot not in slots.tolist()]
        assert not bool(keys.flatten(0, 1)[untouched].any())


class TestAttention:
    @pytest.mark.parametrize("head_dim", [24, 32, 64, 96, 128])
    @pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)])
    def test_close_to_reference(
        self, native: NativeLibrary, dtype: torch.dtype, head_dim: int, heads: tuple[int, int]
    ) -> None:
        context = Context([70, 200, 65, 1], dtype, heads, head_dim)
        out = context.native(native, *MIXED)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), context.reference(*MIXED), **TOLERANCE[dtype])

    @pytest.mark.parametrize("block_size", [1, 5, 16, 128])
    def test_block_size_changes_no_bit(
        self, native: NativeLibrary, dtype: torch.dtype, block_size: int
    ) -> None:
        expected = Context([70, 200, 65, 1], dtype, block_size=16).native(native, *MIXED)
        context = Context([70, 200, 65, 1], dtype, block_size=block_size)
        assert torch.equal(context.native(native, *MIXED), expected)

    def test_every_split_equals_the_whole(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        context = Context([131], dtype, (9, 3))
        whole = context.native(native, (0, 0, 131))
        for split in range(1, 131):
            first = context.native(native, (0, 0, split))
            second = context.native(native, (0, split, 131))
            assert torch.equal(torch.cat([first, second]), whole), split

    def test_decodes_equal_the_prefill(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        context = Context([200], dtype, (9, 3), head_dim=64)
        whole = context.native(native, (0, 0, 200))
        steps = [context.native(native, (0, idx, idx + 1)) for idx in range(200)]
        assert torch.equal(torch.cat(steps), whole)

    def test_company_changes_no_bit(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        context = Context([70, 200, 65, 1], dtype)
        alone = torch.cat([context.native(native, part) for part in MIXED])
        assert torch.equal(context.native(native, *MIXED), alone)
        backwards = context.native(native, *reversed(MIXED))
        parts = backwards.split([end - begin for _, begin, end in reversed(MIXED)])
        assert torch.equal(torch.cat(parts[::-1]), alone)

    def test_neighbour_with_nan_changes_nothing(
        self, native: NativeLibrary, dtype: torch.dtype
    ) -> None:
        context = Context([70, 80], dtype)
        clean = context.native(native, (0, 69, 70), (1, 79, 80))
        context.keys[context.block_tables[1, 0]] = float("nan")
        poisoned = context.native(native, (0, 69, 70), (1, 79, 80))
        assert torch.equal(clean[0], poisoned[0])
        assert bool(poisoned[1].isnan().all())

    def test_large_scores_do_not_overflow(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        context = Context([150], dtype)
        context.queries[0] *= 300
        out = context.native(native, (0, 0, 150))
        assert bool(out.isfinite().all())
        torch.testing.assert_close(
            out.float(), context.reference((0, 0, 150)), **TOLERANCE[torch.bfloat16]
        )


class TestThreads:
    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    def test_number_of_threads_changes_no_bit(
        self, native: NativeLibrary, dtype: torch.dtype, count: int
    ) -> None:
        packed = native.pack_linear(normal(300, 65, dtype=dtype))
        states = normal(50, 65, seed=1, dtype=dtype)
        context = Context([70, 200, 65, 1], dtype)
        expected = native.linear(states, packed), context.native(native, *MIXED)
        with num_threads(count):
            assert torch.equal(native.linear(states, packed), expected[0])
            assert torch.equal(context.native(native, *MIXED), expected[1])

    def test_one_openmp_runtime_and_one_pool(self) -> None:
        """In a process of its own: nothing but torch and the kernels is loaded there."""
        done = subprocess.run(
            [sys.executable, "-c", _OPENMP_PROBE],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PROBE": str(kernels_dir())},
            check=True,
        )
        runtimes, threads_before, threads_after = done.stdout.split()
        assert runtimes == "1"
        assert threads_before == threads_after

    def test_torch_runtime_is_found(self) -> None:
        assert "gomp" in share_torch_openmp().name


_OPENMP_PROBE = """
import os
from pathlib import Path
import torch
from shoal.kernels.native_library import load_native
torch.set_num_threads(3)
torch.ones(512, 512) @ torch.ones(512, 512)
torch.ones(10_000_000).add_(1)
before = len(os.listdir("/proc/self/task"))
native = load_native(Path(os.environ["PROBE"]))
native.linear(torch.ones(64, 64), native.pack_linear(torch.ones(640, 64)))
after = len(os.listdir("/proc/self/task"))
lines = Path("/proc/self/maps").read_text().splitlines()
runtimes = {line.split()[-1] for line in lines if "gomp" in line or "iomp" in line}
print(len(runtimes), before, after)
"""


class TestBuild:
    def test_second_build_is_a_look_up(self, tmp_path: Path) -> None:
        notices: list[str] = []
        first = build_library(tmp_path, notices.append)
        assert build_library(tmp_path, notices.append) == first
        assert len(notices) == 1
        assert [path.name for path in tmp_path.iterdir()] == [first.name]

    def test_two_builders_at_once(self, tmp_path: Path) -> None:
        built: list[Path] = []
        threads = [
            threading.Thread(target=lambda: built.append(build_library(tmp_path))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(built) == 2
        assert built[0] == built[1]
        assert load_native(tmp_path).instructions

    def test_no_compiler_is_one_clear_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(NativeBuildError, match="no C\\+\\+ compiler"):
            build_library(tmp_path / "kernels")

    def test_failing_compiler_is_one_clear_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = tmp_path / "g++"
        fake.write_text(
            "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x: error: no' >&2; exit 1\n"
        )
        fake.chmod(0o755)
        monkeypatch.setenv("CXX", str(fake))
        with pytest.raises(NativeBuildError, match="error: no"):
            build_library(tmp_path / "kernels")
        assert not list((tmp_path / "kernels").iterdir())

    @pytest.mark.parametrize("march", ["x86-64-v3", "x86-64"])
    def test_narrower_instructions_give_the_same_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, march: str
    ) -> None:
        """AVX2 and plain code, which this CPU would not be given of itself."""
        wrapper = tmp_path / "c++"
        wrapper.write_text(
            f"#!/bin/sh\nfor a; do shift; [ $a = -march=native ] && a=-march={march}\n"
            f'set -- "$@" $a; done\nexec {find_compiler()} "$@"\n'
        )
        wrapper.chmod(0o755)
        monkeypatch.setenv("CXX", str(wrapper))
        narrow = load_native(tmp_path / "kernels")
        assert narrow.instructions == {"x86-64-v3": "AVX2", "x86-64": "portable"}[march]
        for dtype in (torch.float32, torch.bfloat16):
            TestLinear().test_close_to_exact(narrow, dtype, 13, 95, 65)
            TestLinear().test_gated(narrow, dtype, 23, True)
            TestLinear().test_a_row_alone_equals_the_row_among_others(narrow, dtype, 95, 64)
            TestAttention().test_close_to_reference(narrow, dtype, 24, (9, 3))
            TestAttention().test_decodes_equal_the_prefill(narrow, dtype)
            TestAttention().test_company_changes_no_bit(narrow, dtype)
