"""The blocks of layers with a sliding window: only what the window still needs is kept."""

from shoal.scheduler.block_pool import num_blocks_for


def most_blocks_a_sequence(window: int, block_size: int) -> int:
    """Blocks that a sequence holds beside those of the tokens it computes in a step.

    A window starts and a step's tokens end anywhere in a block: each costs one block more.
    """
    return num_blocks_for(window - 1, block_size) + 2


def most_window_blocks(
    window: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """Blocks with which a window's pool never runs out, however long the sequences are."""
    per_sequence = most_blocks_a_sequence(window, block_size)
    return max_num_seqs * per_sequence + num_blocks_for(max_num_batched_tokens, block_size)
