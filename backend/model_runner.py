"""Runs one step on the device: scheduled sequences in, sampled tokens out."""

import logging
from array import array
from collections.abc import Sequence as SequenceOf
from enum import Enum
from typing import Protocol

import torch

from shoal.backend.engine import RunResult
from shoal.backend.forward_batch import (
    ForwardBatch,
    GroupTables,
    HiddenStates,
    LikeliestTokens,
    SoftTokens,
)
from shoal.backend.grammar_matcher import GrammarMatchers
from shoal.backend.image_store import ImageStore
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.kv_mover import KVMover
from shoal.backend.logits_processors import NONE_ALLOWED, AllowedTokens
from shoal.backend.logits_rows import LogitsRows, PooledTokens, ScoredTokens
from shoal.backend.pressure_guard import PressureGuard, is_out_of_memory
from shoal.backend.prompt_ends import KnownEnds, Projected
from shoal.backend.sampler import (
    SampleError,
    describe_token,
    sample,
    take_likeliest,
    takes_likeliest,
)
from shoal.backend.structured_output import unusable_grammar
from shoal.kernels.native_library import NativeLibrary
from shoal.scheduler.images import image_cut_by
from shoal.scheduler.outputs import SampledToken, ScheduledSequence, SchedulerOutput
from shoal.scheduler.sequence import PooledStates, Sequence
from shoal.scheduler.transfers import DeviceCopy, only_device_copies

logger = logging.getLogger(__name__)

FORWARD_FAILED = "The model failed on this sequence; the server's log has the cause."
OUT_OF_MEMORY = "The server has too little memory left for this sequence."
MAX_SPENT_LOGITS = 64 * 2**20  # bytes of logits that are kept for the next step's

Batch = tuple[ScheduledSequence, ...]


class Model(Protocol):
    """A loaded model. ``forward`` writes K and V of the batch's tokens into ``kv`` and returns
    logits: float32 [num_samples, vocab_size], rows as in ``batch.logits_indices``."""

    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor: ...


class ModelRunner:
    """Owns the model and the KV cache; everything on the device happens here."""

    def __init__(
        self,
        model: Model,
        kv_cache: PagedKVCache,
        device: torch.device,
        guard: PressureGuard | None = None,
        mover: KVMover | None = None,
        grammars: GrammarMatchers | None = None,
        native: NativeLibrary | None = None,
        images: ImageStore | None = None,
        ends: KnownEnds | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = device
        self._guard = guard
        self._mover = mover
        self._grammars = grammars
        self._native = native
        self._images = images
        self._ends = ends
        self._owed: list[DeviceCopy] = []  # ordered, and not carried out yet
        self._spent_logits: torch.Tensor | None = None

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> RunResult:
        """Run all scheduled sequences as one batch. A sequence that breaks it fails alone.

        A batch for which memory does not suffice runs in halves, again in halves if need be. A
        chunk that is too large alone is deferred: the guard has smaller ones scheduled from then
        on. Running a sequence again only rewrites the same KV slots.
        """
        result = RunResult({}, {})
        if self._mover is not None:
            self._mover.carry_out(output.transfers)
        else:  # without a host tier there is nothing else to move
            self._carry_out_owed()
            self._owed = only_device_copies(output.transfers)
        batches = [output.scheduled] if output.scheduled else []
        while batches:
            scheduled = batches.pop()
            failure = self._try_batch(scheduled, result)
            if failure is _Failure.OUT_OF_MEMORY:
                batches += reversed(self._after_failed_allocation(scheduled, result))
            elif failure is _Failure.BROKEN:
                batches += reversed(_find_culprit(scheduled, result))
        return result

    def _carry_out_owed(self) -> None:
        """Copies are made before the next forward pass, and before those of the next step. Nobody
        else reads or writes blocks, and a step that runs none is over sooner. One that fails is
        still owed: the batch may be tried again."""
        while self._owed:
            self._kv_cache.copy_blocks(self._owed[:1])
            del self._owed[0]

    def _try_batch(self, scheduled: Batch, result: RunResult) -> "_Failure | None":
        """Run a batch. On failure only its kind is kept: the error would hold on to its tensors."""
        try:
            self._run_batch(scheduled, result)
        except Exception as error:
            if _device_is_lost(error):
                raise
            logger.error("a step of %d sequences failed", len(scheduled), exc_info=error)
            return _Failure.OUT_OF_MEMORY if is_out_of_memory(error) else _Failure.BROKEN
        return None

    def _run_batch(self, scheduled: Batch, result: RunResult) -> None:
        rows = LogitsRows.of(scheduled)
        projected = None
        likeliest = _takes_likeliest(scheduled)
        if self._ends is not None:
            projected = self._ends.project(scheduled, likeliest, self._spent_logits)
        if projected is not None:
            result.known_ends.update(item.sequence.seq_id for item in scheduled)
        else:
            projected = self._compute(scheduled, rows, likeliest, result)
        logits, token_ids = projected
        if logits is not None:
            self._keep_logits(logits)
        sequences = [item.sequence for item in scheduled if item.samples]
        if token_ids is not None:
            tokens = take_likeliest(token_ids)
            for sequence, token in zip(sequences, tokens, strict=True):
                _record(result, sequence, token)
        elif logits is not None:
            self._sample(logits, rows, sequences, result)

    def _compute(
        self, scheduled: Batch, rows: LogitsRows, likeliest: bool, result: RunResult
    ) -> Projected:
        """The forward pass, and what comes of it beside logits. ``likeliest``: only the likeliest
        tokens are wanted."""
        self._carry_out_owed()
        ended = [] if self._ends is None else self._ends.of_step(scheduled, rows)
        batch = build_forward_batch(
            scheduled,
            self._kv_cache.block_size,
            self._device,
            self._images,
            self._spent_logits,
            chooses=likeliest,
            keeps_states=bool(ended),
            rows=rows,
        )
        logits = self._model.forward(batch, self._kv_cache)
        projected = Projected.of(logits, batch.likeliest)
        if batch.block_mass is not None:
            _record_mass(result, scheduled, batch.block_mass)
        states = batch.hidden.states if batch.hidden is not None else None
        for pooled in rows.pooled:
            assert states is not None
            result.pooled[pooled.item.sequence.seq_id] = _pool(states, pooled)
        if self._ends is not None and ended:
            assert states is not None
            self._ends.keep(ended, states, projected)
        return projected

    def _sample(
        self,
        logits: torch.Tensor,
        rows: LogitsRows,
        sequences: list[Sequence],
        result: RunResult,
    ) -> None:
        for scored in rows.scored:
            result.scored[scored.item.sequence.seq_id] = _score(logits, scored)
        if not sequences:
            return
        if rows.scored or rows.pooled:
            logits = logits[rows.sampled]
        allowed = self._allowed_tokens(sequences, logits.shape[-1], result)
        left_out = result.refused.keys() | result.deferred
        whole = [i for i, item in enumerate(sequences) if item.seq_id not in left_out]
        if len(whole) < len(sequences):
            if not whole:
                return
            logits, sequences = logits[whole], [sequences[row] for row in whole]
        tokens = sample(logits, sequences, allowed, self._native, keeps_logits=False)
        for sequence, token in zip(sequences, tokens, strict=True):
            _record(result, sequence, token)

    def _keep_logits(self, logits: torch.Tensor) -> None:
        """For the next step to write over; the largest, but nothing excessive."""
        spent = self._spent_logits
        is_larger = spent is None or logits.numel() > spent.numel()
        if self._native and is_larger and logits.nbytes <= MAX_SPENT_LOGITS:
            self._spent_logits = logits

    def _allowed_tokens(
        self, sequences: list[Sequence], vocab_size: int, result: RunResult
    ) -> AllowedTokens:
        """Of those that follow a grammar. One whose grammar breaks is refused."""
        bound = [sequence for sequence in sequences if sequence.sampling.grammar is not None]
        if not bound:
            return NONE_ALLOWED
        assert self._grammars is not None
        masks = self._grammars.masks(bound, vocab_size)
        result.deferred.update(masks.waiting)
        for sequence in bound:
            if reason := masks.broken.get(sequence.seq_id):
                logger.info("the grammar of sequence %d broke: %s", sequence.seq_id, reason)
                param = sequence.sampling.grammar_param or "grammar"
                result.refused[sequence.seq_id] = unusable_grammar(param, reason).message
        return masks.allowed

    def _after_failed_allocation(self, scheduled: Batch, result: RunResult) -> list[Batch]:
        """Have memory freed and say what to run instead."""
        num_tokens = sum(item.num_tokens for item in scheduled)
        if self._guard is not None:
            self._guard.allocation_failed(num_tokens)
        if len(scheduled) > 1:
            middle = len(scheduled) // 2
            return [scheduled[:middle], scheduled[middle:]]
        seq_id = scheduled[0].sequence.seq_id
        if self._guard is not None and _can_be_shorter(scheduled[0]):
            result.deferred.add(seq_id)
        else:
            logger.error("sequence %d does not fit in the memory that is left", seq_id)
            result.failed[seq_id] = OUT_OF_MEMORY
        return []


class _Failure(Enum):
    BROKEN = 0
    OUT_OF_MEMORY = 1


def _find_culprit(scheduled: Batch, result: RunResult) -> list[Batch]:
    """Each sequence alone, or none when the one that breaks batches is found."""
    if len(scheduled) > 1:
        return [(item,) for item in scheduled]
    seq_id = scheduled[0].sequence.seq_id
    logger.error("sequence %d failed alone", seq_id)
    result.failed[seq_id] = FORWARD_FAILED
    return []


def _record(result: RunResult, sequence: Sequence, token: SampledToken | SampleError) -> None:
    if isinstance(token, SampleError):
        logger.error("sequence %d: %s", sequence.seq_id, token.message)
        result.failed[sequence.seq_id] = token.message
    else:
        result.sampled[sequence.seq_id] = token


def _score(logits: torch.Tensor, scored: ScoredTokens) -> dict[int, SampledToken]:
    """What the model thought of a prompt's tokens, by position."""
    sequence = scored.item.sequence
    count = sequence.sampling.prompt_logprobs
    return {
        position: describe_token(logits[row], count, sequence.token_ids[position])
        for row, position in enumerate(scored.positions, scored.first_row)
    }


def _pool(states: torch.Tensor, pooled: PooledTokens) -> PooledStates:
    """What was pooled before, and these tokens. Token after token in float64, so that the sum's
    bits do not depend on how the prompt was cut into steps."""
    sequence, positions = pooled.item.sequence, pooled.positions
    rows = states[pooled.first_row : pooled.first_row + len(positions)].double()
    if sequence.sampling.pooling == "last":
        return PooledStates(1, tuple(rows[0].tolist()))
    before = sequence.pooled or PooledStates(0, (0.0,) * rows.shape[1])
    total = torch.tensor(before.values, dtype=torch.float64, device=rows.device)
    # After a preemption tokens are computed again that were pooled before.
    for row in rows[max(before.num_tokens - positions.start, 0) :]:
        total += row
    return PooledStates(max(positions.stop, before.num_tokens), tuple(total.tolist()))


def _record_mass(result: RunResult, scheduled: Batch, block_mass: torch.Tensor) -> None:
    for item, row in zip(scheduled, block_mass.tolist(), strict=True):
        if _needs_mass(item.sequence):
            result.block_mass[item.sequence.seq_id] = row[: len(item.sequence.block_table)]


def _takes_likeliest(scheduled: SequenceOf[ScheduledSequence]) -> bool:
    """Whether the step's logits serve to choose the likeliest tokens and nothing else."""
    for item in scheduled:
        sequence = item.sequence
        if item.samples and not takes_likeliest(sequence):
            return False
        if sequence.sampling.pooling is not None or sequence.scores_prompt:
            return False
    return True


def _needs_mass(sequence: Sequence) -> bool:
    return sequence.eviction is not None and sequence.eviction.policy.needs_mass


def _device_is_lost(error: Exception) -> bool:
    """An accelerator's error stays until the process ends: nobody is the culprit, and the worker
    must be replaced."""
    return isinstance(error, torch.AcceleratorError)


def build_forward_batch(
    scheduled: SequenceOf[ScheduledSequence],
    block_size: int,
    device: torch.device,
    images: ImageStore | None = None,
    spent_logits: torch.Tensor | None = None,
    chooses: bool = False,
    keeps_states: bool = False,
    rows: LogitsRows | None = None,
) -> ForwardBatch:
    """The flat batch of this step's tokens, sequence after sequence. ``chooses``: only the
    likeliest tokens are wanted, and the model may give those instead of its logits.
    ``keeps_states``: what these are made of is wanted, too, as it is for whoever pools. ``rows``:
    the layout of the step's logits, if it is known."""
    sequences = [item.sequence for item in scheduled]
    query_lens = [item.num_tokens for item in scheduled]
    starts = [sequence.num_computed_tokens for sequence in sequences]
    input_ids, positions = array("q"), array("q")
    for sequence, start, count in zip(sequences, starts, query_lens, strict=True):
        if count == 1:  # as most are
            input_ids.append(sequence.token_ids[start])
            positions.append(start)
        else:
            input_ids.extend(sequence.token_ids[start : start + count])
            positions.extend(range(start, start + count))
    # The first group's table is compact where tokens were dropped from it.
    held = [s.num_computed_tokens - s.num_evicted_tokens for s in sequences]
    groups = tuple(
        _group_tables(tables, starts if idx else held, query_lens, block_size, device)
        for idx, tables in enumerate(zip(*(s.block_tables for s in sequences), strict=True))
    )
    rows = LogitsRows.of(scheduled) if rows is None else rows
    wants_states = keeps_states or bool(rows.pooled)
    block_mass = None
    if any(_needs_mass(s) for s in sequences if s.eviction is not None):
        block_mass = torch.zeros_like(groups[0].block_tables)

    return ForwardBatch(
        input_ids=_to_device(input_ids, device),
        positions=_to_device(positions, device),
        groups=groups,
        query_lens=query_lens,
        logits_indices=_to_device(array("q", rows.batch_rows), device),
        block_mass=block_mass,
        hidden=HiddenStates() if wants_states else None,
        soft_tokens=_soft_tokens(scheduled, images, device) if images is not None else None,
        spent_logits=spent_logits,
        likeliest=LikeliestTokens() if chooses else None,
    )


def _soft_tokens(
    scheduled: SequenceOf[ScheduledSequence], images: ImageStore, device: torch.device
) -> SoftTokens | None:
    """The embeddings of those tokens of the step that stand for parts of images."""
    rows: list[int] = []
    embeddings: list[torch.Tensor] = []
    spans: list[list[range]] = []
    first_row = 0
    for item in scheduled:
        tokens = _token_range(item)
        spans.append([])
        for image in item.sequence.images:
            start, stop = max(image.start, tokens.start), min(image.stop, tokens.stop)
            if start >= stop:
                continue
            first = first_row + start - tokens.start
            rows += range(first, first + stop - start)
            encoded = images.embeddings(image.digest, image.num_tokens)
            embeddings.append(encoded[start - image.start : stop - image.start])
            # Only of this step: attention takes another form where there are any.
            spans[-1].append(image.positions)
        first_row += item.num_tokens
    if not rows:
        return None
    indices = torch.tensor(rows, dtype=torch.int64).to(device)
    return SoftTokens(indices, torch.cat(embeddings).to(device), spans)


def _can_be_shorter(item: ScheduledSequence) -> bool:
    """Whether the sequence could go on with fewer tokens: a whole image cannot."""
    start = item.sequence.num_computed_tokens
    return item.num_tokens > 1 and image_cut_by(item.sequence.images, start + 1) is None


def _group_tables(
    tables: SequenceOf[list[int]],
    starts: list[int],
    query_lens: list[int],
    block_size: int,
    device: torch.device,
) -> GroupTables:
    """``starts``: the cache index of each sequence's first token of the step."""
    stops = [start + count for start, count in zip(starts, query_lens, strict=True)]
    slots = [
        table[index // block_size] * block_size + index % block_size
        for table, start, stop in zip(tables, starts, stops, strict=True)
        for index in range(start, stop)
    ]
    width = max(map(len, tables))
    padded = array("q")
    for table in tables:
        padded.fromlist(table)
        padded.frombytes(bytes(padded.itemsize * (width - len(table))))
    return GroupTables(
        _to_device(array("q", slots), device),
        _to_device(padded, device).view(len(tables), width),
        stops,
    )


def _to_device(values: "array[int]", device: torch.device) -> torch.Tensor:
    """int64, flat. Such arrays become tensors much faster than lists do."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    tensor = torch.frombuffer(values, dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.to(device)


def _token_range(item: ScheduledSequence) -> range:
    start = item.sequence.num_computed_tokens
    return range(start, start + item.num_tokens)
