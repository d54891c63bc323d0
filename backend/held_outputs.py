"""Which tokens wait a step so that two steps' travel together: what a message costs on its way to
the clients is then spent half as often."""

from collections.abc import Sequence

from shoal.scheduler.outputs import StepOutput

MIN_OUTPUTS = 8  # of a step; fewer cost little to send
MAX_STEP_S = 0.05  # of steps whose tokens may wait: a client is to see some each 0.1 s


class HeldOutputs:
    """Owned by the worker's loop, which asks after each step what to send.

    Every second step's tokens go with those of the step before it, each sequence's side by side. A
    first token, an end or an error never waits. Nothing does where few sequences gain something,
    where steps are long, or where none follows at once; nor for a step with a new prompt in it.
    """

    def __init__(self) -> None:
        self._held: dict[int, StepOutput] = {}  # of one step, by seq_id

    def forget(self, seq_id: int) -> None:
        """Nobody wants to hear of this sequence any more."""
        self._held.pop(seq_id, None)

    def release(self) -> list[StepOutput]:
        """All that waits, to be sent now: the next step may be a long one."""
        held, self._held = self._held, {}
        return list(held.values())

    def take(self, outputs: Sequence[StepOutput], step_s: float, goes_on: bool) -> list[StepOutput]:
        """What to send after a step that gave ``outputs`` and took ``step_s`` seconds.

        ``goes_on``: another step follows at once.
        """
        may_wait = goes_on and len(outputs) >= MIN_OUTPUTS and step_s <= MAX_STEP_S
        if may_wait and not self._held:
            self._held = {output.seq_id: output for output in outputs if not _is_urgent(output)}
            return [output for output in outputs if _is_urgent(output)]
        if not self._held:
            return list(outputs)
        held, self._held = self._held, {}
        sent = []
        for output in outputs:
            if output.seq_id in held:
                sent.append(held.pop(output.seq_id))
            sent.append(output)
        return [*held.values(), *sent]


def _is_urgent(output: StepOutput) -> bool:
    return output.output_index == 0 or output.finish_reason is not None or output.token is None
