"""The native CPU kernels: close to the reference, and blind to whatever else is in the batch."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import native_attention
import pytest
import torch
from attention_context import MIXED, TOLERANCE, Context, normal, num_threads
from torch.nn import functional

from shoal.backend.weights.catalogue import kernels_dir
from shoal.kernels.layer_cache import SCALED_DTYPES, LayerCache
from shoal.kernels.native_build import NativeBuildError, build_library, find_compiler
from shoal.kernels.native_heads import AttentionHeads, HeadNorms, NewKeys
from shoal.kernels.native_library import (
    Epilogue,
    NativeLibrary,
    SampleParams,
    load_native,
)
from shoal.kernels.native_openmp import share_torch_openmp
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rotary_embedding import rotary_angles, rotary_embedding


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
        cache = LayerCache(keys, values)
        heads = AttentionHeads(num_heads, num_kv_heads, head_dim, 1.0)
        query = native.rotate_and_write(qkv, positions, inv_freq, slots, cache, heads, dtype)

        by_head = qkv.view(5, -1, head_dim)
        rotated = rotary_embedding(by_head, rotary_angles(positions, inv_freq, torch.float32))
        close = TOLERANCE[dtype]
        torch.testing.assert_close(query, rotated[:, :num_heads].to(dtype), **close)
        written = keys.flatten(0, 1)[slots]
        torch.testing.assert_close(written, rotated[:, num_heads:-num_kv_heads].to(dtype), **close)
        assert torch.equal(values.flatten(0, 1)[slots], by_head[:, -num_kv_heads:].to(dtype))
        untouched = [slot for slot in range(20) if slot not in slots.tolist()]
        assert not bool(keys.flatten(0, 1)[untouched].any())


class TestHeads:
    """What happens to heads between their product and attention."""

    def parts(self, dtype: torch.dtype, new_keys: NewKeys) -> tuple[torch.Tensor, LayerCache]:
        """Rows for 4 query and 2 key/value heads of 48 features, and a cache."""
        per_row = 4 + {NewKeys.OWN: 4, NewKeys.VALUES_ARE_KEYS: 2, NewKeys.NONE: 0}[new_keys]
        shape = (2, 4, 2, 48)
        cache = LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        return normal(3, per_row * 48), cache

    def test_norms_and_partial_rotation(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        rows, cache = self.parts(dtype, NewKeys.OWN)
        positions, slots = torch.tensor([5, 0, 900]), torch.tensor([6, 1, 3])
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, 16, 2) / 16))
        query_norm, key_norm = normal(48, seed=1), normal(48, seed=2)
        norms = HeadNorms(1e-6, query_norm, key_norm, value=True)
        heads = AttentionHeads(4, 2, 48, 1.0)
        query = native.rotate_and_write(
            rows, positions, inv_freq, slots, cache, heads, dtype, norms, factor=1.5
        )

        queries, keys, values = rows.view(3, 8, 48).split([4, 2, 2], dim=1)
        angles = rotary_angles(positions, inv_freq, torch.float32, 1.5)
        rotated = []
        for states, weight in ((queries, query_norm), (keys, key_norm)):
            normed = rms_norm(states, weight, 1e-6)
            turned = rotary_embedding(normed[..., :16], angles)
            rotated.append(torch.cat([turned, normed[..., 16:]], dim=-1).to(dtype))
        close = TOLERANCE[dtype]
        torch.testing.assert_close(query, rotated[0], **close)
        torch.testing.assert_close(cache.keys.flatten(0, 1)[slots], rotated[1], **close)
        expected = rms_norm(values, torch.ones(48), 1e-6).to(dtype)
        torch.testing.assert_close(cache.values.flatten(0, 1)[slots], expected, **close)

    def test_values_that_are_keys(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        rows, cache = self.parts(dtype, NewKeys.VALUES_ARE_KEYS)
        slots = torch.tensor([6, 1, 3])
        native.rotate_and_write(
            rows,
            torch.tensor([5, 0, 900]),
            1.0 / (10000.0 ** (torch.arange(0, 48, 2) / 48)),
            slots,
            cache,
            AttentionHeads(4, 2, 48, 1.0),
            dtype,
            new_keys=NewKeys.VALUES_ARE_KEYS,
        )
        raw = rows.view(3, 6, 48)[:, 4:].to(dtype)
        assert torch.equal(cache.values.flatten(0, 1)[slots], raw)
        assert torch.equal(cache.keys.flatten(0, 1)[1], raw[1])  # at position 0 nothing turns
        assert not torch.equal(cache.keys.flatten(0, 1)[slots], raw)

    def test_queries_alone_leave_the_cache(self, native: NativeLibrary, dtype: torch.dtype) -> None:
        rows, cache = self.parts(dtype, NewKeys.NONE)
        query = native.rotate_and_write(
            rows,
            torch.tensor([5, 0, 900]),
            torch.zeros(0),
            torch.tensor([6, 1, 3]),
            cache,
            AttentionHeads(4, 2, 48, 1.0),
            dtype,
            new_keys=NewKeys.NONE,
        )
        assert torch.equal(query.flatten(1), rows.to(dtype))
        assert not cache.keys.any()
        assert not cache.values.any()


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
from shoal.kernels.layer_cache import SCALED_DTYPES, LayerCache
from shoal.kernels.native_heads import AttentionHeads, HeadNorms, NewKeys
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


NARROWER = {"x86-64-v4": "AVX-512", "x86-64-v3": "AVX2", "x86-64": "portable"}


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

    @pytest.mark.parametrize("march", ["x86-64-v4", "x86-64-v3", "x86-64"])
    def test_narrower_instructions_give_the_same_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, march: str
    ) -> None:
        """Fewer instructions and plain code, which this CPU would not be given of itself."""
        wrapper = tmp_path / "c++"
        wrapper.write_text(
            f"#!/bin/sh\nfor a; do shift; [ $a = -march=native ] && a=-march={march}\n"
            "[ $a = -O3 ] && a=-O1\n"  # compiled in half the time
            f'set -- "$@" $a; done\nexec {find_compiler()} "$@"\n'
        )
        wrapper.chmod(0o755)
        monkeypatch.setenv("CXX", str(wrapper))
        narrow = load_native(tmp_path / "kernels")
        monkeypatch.delenv("CXX")
        assert narrow.instructions == NARROWER[march]
        logits = normal(5, 3001) * 3
        params = [
            SampleParams(temperature=heat, top_p=0.9, min_p=0.01, top_k=heat, random_bits=2**50)
            for heat in range(5)
        ]
        expected = load_native(kernels_dir()).sample(logits, params)
        assert narrow.sample(logits, params) == expected
        for dtype in (torch.float32, torch.bfloat16):
            TestLinear().test_close_to_exact(narrow, dtype, 13, 95, 65)
            TestLinear().test_gated(narrow, dtype, 23, True)
            TestLinear().test_a_row_alone_equals_the_row_among_others(narrow, dtype, 95, 64)
            TestHeads().test_norms_and_partial_rotation(narrow, dtype)
            for window, softcap in ((None, None), (40, 5.0)):
                native_attention.check_close_to_reference(
                    narrow, dtype, window, softcap, 24, (9, 3)
                )
                native_attention.check_decodes_equal_the_prefill(narrow, dtype, window)
                native_attention.check_company_changes_no_bit(narrow, dtype, window)
            native_attention.check_split_tasks_change_no_bit(narrow, dtype, None)
            native_attention.check_shared_tasks_change_no_bit(narrow, dtype, 40)
            for stored in SCALED_DTYPES:
                check = native_attention.check_close_to_reference
                check(narrow, dtype, None, None, 64, (9, 3), stored)
                native_attention.check_decodes_equal_the_prefill(narrow, dtype, 40, stored)
