"""What holds of any model on the native kernels: nearness to the reference, and the same bits."""

from pathlib import Path
from typing import Any

import torch
from paged_runs import make_cache, make_paged_sequence, run_step

from shoal.backend.weights.loader import load_model

BLOCKS = (11, 2, 40, 7, 63, 1, 33, 20, 5, 18, 50, 9, 27)


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def alone_at_once(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits of every position, from one prefill of one sequence."""
    sequence = make_paged_sequence(token_ids, BLOCKS)
    return run_step(model, make_cache(model), (sequence, len(token_ids)), all_rows=True)


def in_chunks(model: Any, token_ids: list[int], *sizes: int) -> torch.Tensor:
    sequence, kv = make_paged_sequence(token_ids, BLOCKS), make_cache(model)
    return torch.cat([run_step(model, kv, (sequence, size), all_rows=True) for size in sizes])


def check_closeness(
    checkpoint: Path, token_ids: list[int], logits: torch.Tensor, dtype: torch.dtype
) -> None:
    """In fp32 equal but for the order of sums. In bf16 nearer to fp32 than the reference is, which
    rounds after every op; how near is up to the model."""
    exact = alone_at_once(load_model(checkpoint, torch.float32).model, token_ids)
    if dtype == torch.float32:
        torch.testing.assert_close(logits, exact, rtol=0, atol=2e-3)
        return
    rounded = alone_at_once(load_model(checkpoint, dtype).model, token_ids)
    assert (logits - exact).abs().mean() < (rounded - exact).abs().mean()


def check_invariance(model: Any, splits: range) -> None:
    """One sequence by every way that its logits can come about: the same bits."""
    vocab_size = model.config.vocab_size
    ids = random_ids(45, vocab_size)
    whole = alone_at_once(model, ids)
    for split in splits:
        assert torch.equal(in_chunks(model, ids, split, 45 - split), whole), split
    assert torch.equal(in_chunks(model, ids, 30, *[1] * 15), whole)

    # Beside a prefill and a decode, in the middle of the batch, with blocks of its own.
    kv = make_cache(model)
    before = make_paged_sequence(random_ids(21, vocab_size, 1), range(20, 30))
    after = make_paged_sequence(random_ids(34, vocab_size, 2), range(30, 40))
    ours = make_paged_sequence(ids, range(15))
    run_step(model, kv, (after, 33))
    rows = run_step(model, kv, (before, 21), (ours, 17), (after, 1), all_rows=True)
    assert torch.equal(rows[21:38], whole[:17])
    assert torch.equal(run_step(model, kv, (ours, 28))[0], whole[-1])

    # Preempted: its blocks are lost, and it is computed again into others.
    again = make_paged_sequence(ids, range(44, 60))
    assert torch.equal(run_step(model, kv, (again, 45))[0], whole[-1])

    # Many decodes at once.
    many = [make_paged_sequence(ids, range(idx * 12, idx * 12 + 12)) for idx in range(17)]
    kv = make_cache(model, num_blocks=17 * 12)
    for sequence in many:
        run_step(model, kv, (sequence, 44))
    rows = run_step(model, kv, *((sequence, 1) for sequence in many))
    assert torch.equal(rows, whole[-1].expand(17, -1))

    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.equal(alone_at_once(model, ids), whole)
    torch.set_num_threads(threads)
