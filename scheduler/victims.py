"""Whose blocks are taken when they run out."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from shoal.scheduler.return_cost import ReturnPlan
from shoal.scheduler.sequence import Sequence


def choose_victim(
    running: SequenceOf[Sequence],
    needy: Sequence,
    return_plan: Callable[[Sequence], ReturnPlan],
) -> Sequence:
    """The running sequence that comes back at the least cost, each earlier preemption counted in.

    ``running`` is in arrival order. The first is spared: the scheduler's progress rests on it. Of
    the others those that would free no block are of no use, but for ``needy``, which asks for some.
    Of equals the latest arrived goes; and where all blocks are shared, so that only two together
    would free any.
    """
    assert len(running) > 1, "one sequence outgrew the whole KV pool"
    best: tuple[float, Sequence] | None = None
    for sequence in reversed(running[1:]):
        plan = return_plan(sequence)
        if plan.num_blocks or sequence is needy:
            price = plan.seconds * (1 + sequence.num_preemptions)
            if best is None or price < best[0]:
                best = (price, sequence)
    return running[-1] if best is None else best[1]
