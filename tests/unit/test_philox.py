import pytest

from shoal.backend.philox import philox4x32, random_bits, uniform

ONES = 0xFFFFFFFF


# From the Random123 distribution, kat_vectors: "philox4x32 10".
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (ONES, ONES, ONES, ONES),
            (ONES, ONES),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_is_a_pure_function_of_seed_and_index():
    table = {(seed, i): uniform(seed, i) for seed in (0, 1, -1, 2**63 - 1) for i in range(50)}
    assert len(set(table.values())) == len(table)
    assert all(uniform(seed, i) == value for (seed, i), value in reversed(table.items()))


def test_seeds_use_all_64_bits():
    assert random_bits(1, 0) != random_bits(1 + 2**32, 0)
    assert random_bits(-1, 0) == random_bits(2**64 - 1, 0)


def test_uniform_stays_inside_the_open_interval_at_the_extremes(monkeypatch):
    import shoal.backend.philox as philox

    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: (ONES,) * 4)
    assert 0.0 < philox.uniform(0, 0) < 1.0
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: (0,) * 4)
    assert 0.0 < philox.uniform(0, 0) < 1.0


def test_uniform_fills_its_bins_evenly():
    num_bins, num_draws = 16, 16_000
    counts = [0] * num_bins
    for i in range(num_draws):
        counts[int(uniform(7, i) * num_bins)] += 1
    expected = num_draws / num_bins
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_square < 37.7  # 99.9th percentile at 15 degrees of freedom
