"""Memory in huge pages: sizes, places and lifetimes."""

import torch

from shoal.kernels.huge_pages import HUGE_PAGE, Arena, huge_empty


def test_large_tensors_begin_at_a_huge_page() -> None:
    tensor = huge_empty([3, HUGE_PAGE // 2], torch.bfloat16)
    assert tensor.shape == (3, HUGE_PAGE // 2)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % HUGE_PAGE == 0
    tensor.fill_(1.0)
    assert tensor.sum(dtype=torch.float64) == tensor.numel()


def test_small_and_empty_tensors() -> None:
    assert huge_empty([2, 3], torch.float32).shape == (2, 3)
    assert huge_empty([0, 3], torch.float32).numel() == 0


def test_a_view_keeps_the_memory() -> None:
    view = huge_empty([HUGE_PAGE], torch.int64).fill_(7)[5:10]
    others = [huge_empty([HUGE_PAGE], torch.int64).fill_(1) for _ in range(3)]
    assert view.tolist() == [7] * 5
    assert len(others) == 3


def test_parts_of_an_arena_follow_each_other() -> None:
    arena = Arena()
    first = arena.empty(1000, torch.float32).fill_(1.0)
    second = arena.empty(15, torch.float32).fill_(2.0)
    large = arena.empty(20 * 2**20, torch.float32)
    assert second.data_ptr() - first.data_ptr() == 4096
    assert first.sum() == 1000
    assert second.tolist() == [2.0] * 15
    assert large.numel() == 20 * 2**20
