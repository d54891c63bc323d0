"""The output projection of a native model as a plan of its own, for states that are known."""

from collections.abc import Callable

import torch

from shoal.backend.forward_batch import KnownStates
from shoal.backend.models.native_parts import logits_memory, wants_tokens
from shoal.kernels.native_library import NativeLibrary, pointer
from shoal.kernels.native_plan import PlanBuilder, StepArguments


class NativeHead:
    """Gives the bits that the whole plan gives for the same states: it runs the same operations on
    the same weights, which it shares with it."""

    def __init__(
        self,
        library: NativeLibrary,
        dtype: torch.dtype,
        hidden_size: int,
        vocab_size: int,
        add_head: Callable[[PlanBuilder, int], None],
    ) -> None:
        """``add_head`` adds the operations from the final states, in the buffer that it is given,
        to the logits."""
        self._vocab_size = vocab_size
        builder = PlanBuilder(library, dtype)
        states = builder.buffer(hidden_size)
        builder.take_states(states)
        add_head(builder, states)
        self._plan = builder.build()

    @torch.inference_mode()
    def project(self, known: KnownStates) -> torch.Tensor:
        """Float32 logits [num_samples, vocab_size]; they mean nothing where the likeliest tokens
        are asked for and given."""
        logits = logits_memory(known, self._vocab_size)
        tokens = wants_tokens(known, self._plan)
        self._plan.run(
            StepArguments(
                num_tokens=known.num_samples,
                num_seqs=known.num_samples,
                num_samples=known.num_samples,
                num_threads=torch.get_num_threads(),
                hidden_states=pointer(known.states, torch.float32),
                logits=pointer(logits, torch.float32),
                tokens=pointer(tokens, torch.int64),
            )
        )
        return logits
