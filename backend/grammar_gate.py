"""Holds a sequence back until its grammar is compiled, so that no step ever waits for that."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import msgspec

from shoal.backend.engine import Engine
from shoal.backend.grammar_compiler import GrammarCompiler
from shoal.backend.messages import AddSequence, WorkerStatus
from shoal.backend.structured_output import unusable_grammar
from shoal.scheduler.outputs import StepOutput
from shoal.scheduler.sequence import FinishReason

POLL_S = 0.005  # while nothing else is to be done


class GrammarGate:
    """An engine to its worker: sequences with a grammar pass to the engine behind it when they
    can run. One thread uses it."""

    def __init__(self, engine: Engine, compiler: GrammarCompiler) -> None:
        self._engine = engine
        self._compiler = compiler
        self._compiling: dict[int, tuple[AddSequence, Future[Any]]] = {}  # by seq_id

    def add(self, message: AddSequence) -> None:
        """As the engine's."""
        if message.sampling.grammar is None:
            self._engine.add(message)
        else:
            future = self._compiler.compile(message.sampling.grammar)
            self._compiling[message.seq_id] = message, future

    def abort(self, seq_id: int) -> None:
        """As the engine's."""
        if self._compiling.pop(seq_id, None) is None:
            self._engine.abort(seq_id)

    def step(self) -> list[StepOutput]:
        """As the engine's; a sequence whose grammar cannot be compiled gets its error here."""
        if not self._engine.has_unfinished:
            futures = [future for _, future in self._compiling.values()]
            wait(futures, POLL_S, return_when=FIRST_COMPLETED)
        refused = self._admit_compiled()
        return refused + (self._engine.step() if self._engine.has_unfinished else [])

    def rest(self) -> None:
        """As the engine's."""
        self._engine.rest()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._compiling) or self._engine.has_unfinished

    @property
    def made_progress(self) -> bool:
        return bool(self._compiling) or self._engine.made_progress

    @property
    def status(self) -> WorkerStatus:
        status = self._engine.status
        if not self._compiling:
            return status
        return msgspec.structs.replace(
            status, num_waiting=status.num_waiting + len(self._compiling)
        )

    def _admit_compiled(self) -> list[StepOutput]:
        refused = []
        for seq_id, (message, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[seq_id]
            error = future.exception()
            if error is None:
                self._engine.add(message)
            else:
                refused.append(_refusal(message, error))
        return refused


def _refusal(message: AddSequence, error: BaseException) -> StepOutput:
    """Intake compiles what comes here, so this is rare; the grammar is at fault all the same."""
    param = message.sampling.grammar_param or "grammar"
    return StepOutput(
        message.seq_id,
        len(message.token_ids) - message.num_prompt_tokens,
        token=None,
        finish_reason=FinishReason.ERROR,
        error=unusable_grammar(param, str(error)).message,
        error_param=param,
    )
