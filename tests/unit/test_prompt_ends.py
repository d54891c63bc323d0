"""A prompt that comes again and is cached whole: no forward pass, and the same bits as with one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_scheduler, make_sequence, run_step
from native_checks import BLOCKS, random_ids
from paged_runs import BLOCK_SIZE, make_cache, make_paged_sequence
from tiny_checkpoint import write_tiny_checkpoint, write_tiny_windowed
from tiny_runs import CPU, make_kv_cache

from shoal.backend.engine import Engine, EngineLimits, RunResult
from shoal.backend.forward_batch import ForwardBatch, KnownStates, LikeliestTokens
from shoal.backend.kv_cache import PagedKVCache
from shoal.backend.messages import AddSequence
from shoal.backend.model_runner import ModelRunner, build_forward_batch
from shoal.backend.models.native import NativeModel, make_native
from shoal.backend.prompt_ends import KeptLogits, KnownEnds, PromptEnds
from shoal.backend.step_log import StepLog
from shoal.backend.weights.loader import load_model
from shoal.kernels.native_library import NativeLibrary
from shoal.load.tiny_models import write_tiny_model
from shoal.scheduler.eviction import LruPolicy
from shoal.scheduler.outputs import ScheduledSequence, StepOutput
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.transfers import DeviceCopy

WINDOW = 11
PROMPT = random_ids(5 * BLOCK_SIZE, 128)
FORMS = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    *((torch.bfloat16, q) for q in ("int8", "int4")),
]


@pytest.fixture(params=FORMS, ids=lambda form: f"{form[0]}-{form[1]}".removeprefix("torch."))
def form(request: pytest.FixtureRequest) -> tuple[torch.dtype, str]:
    return request.param


class CountingModel:
    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self.num_rows: list[int] = []  # of each forward pass

    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> torch.Tensor:
        self.num_rows.append(len(batch.input_ids))
        return self._model.forward(batch, kv)


class Runs:
    """An engine over a tiny model, which knows prompts' ends unless told otherwise."""

    def __init__(
        self,
        model: NativeModel,
        knows_ends: bool = True,
        stored: torch.dtype | None = None,
        **scheduler: Any,
    ) -> None:
        options = {"block_size": BLOCK_SIZE, "prefix_eviction": LruPolicy(), "num_blocks": 64}
        self.scheduler = make_scheduler(**(options | scheduler))
        self.cache = make_kv_cache(
            model.config.kv_layout, self.scheduler, float("nan"), stored or model.dtype
        )
        self.ends = PromptEnds()
        self.known = KnownEnds(model.head, self.ends)
        self.model = CountingModel(model)
        ends = self.known if knows_ends else None
        self.runner = ModelRunner(self.model, self.cache, CPU, ends=ends)
        limits = EngineLimits(model.config.vocab_size, 200, frozenset())
        self.engine = Engine(self.scheduler, self.runner, limits)

    def ask(
        self, prompt: list[int] = PROMPT, seq_id: int = 1, salt: bytes = b"", **sampling: Any
    ) -> list[StepOutput]:
        """One request, to its end."""
        self.add(prompt, seq_id, salt, **sampling)
        outputs = []
        while self.engine.has_unfinished:
            outputs += self.engine.step()
            self.scheduler.check_integrity()
        return outputs

    def add(
        self, prompt: list[int] = PROMPT, seq_id: int = 1, salt: bytes = b"", **sampling: Any
    ) -> None:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling})
        message = AddSequence(seq_id, list(prompt), len(prompt), params, cache_salt=salt)
        self.engine.add(message)

    def num_passes(self, *prompt: Any, **options: Any) -> int:
        """Of a request for one token."""
        before = len(self.model.num_rows)
        self.ask(*prompt, max_tokens=1, **options)
        return len(self.model.num_rows) - before


def make_model(
    folder: Path, native: NativeLibrary, dtype: torch.dtype, kind: str = "none", **config: Any
) -> NativeModel:
    checkpoint = write_tiny_checkpoint(folder / "tiny", **config)
    return make_native(load_model(checkpoint, dtype, quantization=kind).model, native)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, native: NativeLibrary) -> NativeModel:
    return make_model(tmp_path_factory.mktemp("tiny"), native, torch.bfloat16)


@pytest.mark.parametrize("vocab_size", [128, 8200])  # the larger one's head has a screen
def test_the_head_alone_gives_the_bits_of_the_whole_plan(
    tmp_path: Path, native: NativeLibrary, form: tuple[torch.dtype, str], vocab_size: int
) -> None:
    model = make_model(tmp_path, native, *form, vocab_size=vocab_size)
    cache = make_cache(model)
    sequences = [
        make_paged_sequence(random_ids(9 + idx, vocab_size, idx), [block])
        for idx, block in enumerate(BLOCKS)
    ]
    for sequence in sequences:  # all of three tokens
        del sequence.token_ids[3:]
    items = [ScheduledSequence(sequence, 3) for sequence in sequences]
    batch = build_forward_batch(items, BLOCK_SIZE, CPU, keeps_states=True)
    expected = model.forward(batch, cache)
    assert batch.hidden is not None
    states = batch.hidden.states
    assert states is not None
    assert torch.equal(model.head.project(KnownStates(states)), expected)
    for row in range(len(items)):
        likeliest = LikeliestTokens()
        logits = model.head.project(KnownStates(states[row : row + 1], likeliest, expected.clone()))
        assert likeliest.tokens is not None
        assert likeliest.tokens.tolist() == [int(expected[row].argmax())]
        assert logits.shape == (1, vocab_size)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9, "logprobs": 3},
        {"logprobs": 5, "frequency_penalty": 1.5, "max_tokens": 9},
        {"min_tokens": 3, "stop_token_ids": frozenset(range(0, 128, 3))},
    ],
    ids=str,
)
def test_answers_are_those_of_a_forward_pass(
    tmp_path: Path, native: NativeLibrary, form: tuple[torch.dtype, str], sampling: dict[str, Any]
) -> None:
    model = make_model(tmp_path, native, *form)
    plain, runs = Runs(model, knows_ends=False), Runs(model)
    cold = plain.ask(**sampling)
    cached = plain.ask(**sampling)
    runs.ask()
    num_rows = len(runs.model.num_rows)
    for _ in range(2):
        assert runs.ask(**sampling) == cached
    assert [output.token for output in cached] == [output.token for output in cold]
    assert runs.model.num_rows[num_rows:] == [1] * (2 * (len(cached) - 1))
    assert cached[0].num_cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_keys_and_values_in_fewer_bits(tiny: NativeModel, stored: torch.dtype) -> None:
    runs, plain = Runs(tiny, stored=stored), Runs(tiny, knows_ends=False, stored=stored)
    runs.ask()
    plain.ask()
    assert runs.ask(temperature=1.0, seed=5) == plain.ask(temperature=1.0, seed=5)
    assert runs.num_passes() == 0


def test_several_at_once(tiny: NativeModel) -> None:
    prompts = [random_ids(2 * BLOCK_SIZE, 128, seed) for seed in range(3)]
    plain, runs = Runs(tiny, knows_ends=False), Runs(tiny)
    expected = [plain.ask(prompt)[0].token for prompt in prompts]
    for prompt in prompts:
        runs.ask(prompt)
    before = len(runs.model.num_rows)
    for seq_id, prompt in enumerate(prompts):
        runs.add(prompt, seq_id)
    outputs = runs.engine.step()
    assert [output.token for output in outputs] == expected
    assert len(runs.model.num_rows) == before


def test_beside_others_it_runs_as_they_do(tiny: NativeModel) -> None:
    runs, plain, other = Runs(tiny), Runs(tiny, knows_ends=False), random_ids(7, 128, 9)
    texts = [[o.token for o in runs.ask()], [o.token for o in plain.ask(other)]]
    runs.add(other, 1)
    runs.add(PROMPT, 2)
    outputs: list[StepOutput] = []
    while runs.engine.has_unfinished:
        outputs += runs.engine.step()
    assert [o.token for o in outputs if o.seq_id == 2] == texts[0]
    assert [o.token for o in outputs if o.seq_id == 1] == texts[1]
    assert runs.model.num_rows[-6:] == [8, 2, 2, 2, 2, 2]


def test_only_the_same_prompt_of_the_same_salt(tiny: NativeModel) -> None:
    runs = Runs(tiny)
    runs.ask(salt=b"a")
    assert runs.num_passes(salt=b"a") == 0
    assert runs.num_passes(salt=b"b") == 1
    assert runs.num_passes() == 1
    assert runs.num_passes([*PROMPT[:-1], (PROMPT[-1] + 1) % 128], salt=b"a") == 1
    assert runs.num_passes([(PROMPT[0] + 1) % 128, *PROMPT[1:]], salt=b"a") == 1
    assert runs.num_passes([*PROMPT, 5], salt=b"a") == 1
    assert runs.num_passes(salt=b"a") == 0


def test_not_when_its_blocks_were_evicted(tiny: NativeModel) -> None:
    runs = Runs(tiny, num_blocks=8, max_model_len=32)
    first = runs.ask(max_tokens=4)
    runs.ask(random_ids(28, 128, 5), max_tokens=4)
    assert len(runs.ends) == 2
    assert runs.num_passes() == 1
    assert runs.ask(max_tokens=4)[0].token == first[0].token


def test_not_when_its_state_is_forgotten(tiny: NativeModel) -> None:
    runs = Runs(tiny)
    runs.ask()
    runs.ends._ends.clear()
    assert runs.num_passes() == 1
    assert runs.num_passes() == 0


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 1}, {"pooling": "last", "max_tokens": 0}])
def test_who_wants_more_than_the_next_token(tiny: NativeModel, wanted: dict[str, Any]) -> None:
    runs, plain = Runs(tiny), Runs(tiny, knows_ends=False)
    runs.ask()
    plain.ask()
    assert runs.ask(**wanted) == plain.ask(**wanted)


def test_who_forgets_tokens_of_its_own(tiny: NativeModel) -> None:
    """Its state is not that of the whole prompt."""
    lossy = {"kv_policy": "attention_sink", "kv_budget": 64}
    runs = Runs(tiny)
    runs.ask(**lossy)
    assert len(runs.ends) == 0
    runs.ask()
    assert runs.num_passes(**lossy) > 0


@pytest.fixture
def projections(tiny: NativeModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each projection alone."""
    rows: list[int] = []
    project = tiny.head.project

    def counted(known: KnownStates) -> torch.Tensor:
        rows.append(known.num_samples)
        return project(known)

    monkeypatch.setattr(tiny.head, "project", counted)
    return rows


def texts_of(runs: Runs, *requests: dict[str, Any]) -> list[list[Any]]:
    return [[output.token for output in runs.ask(**request)] for request in requests]


def test_its_likeliest_token_is_kept_too(tiny: NativeModel, projections: list[int]) -> None:
    runs, drawn = Runs(tiny), {"temperature": 1.0, "seed": 1}
    texts = texts_of(runs, {}, {}, {}, drawn)
    assert texts[0] == texts[1] == texts[2]
    assert projections == [1]  # all logits, which the likeliest tokens had not told
    assert texts_of(runs, drawn, {}) == [texts[3], texts[0]]
    assert projections == [1]


def test_its_logits_are_kept_as_they_were(tiny: NativeModel, projections: list[int]) -> None:
    requests: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "logit_bias": ((3, 50.0), (5, -100.0))},
        {"temperature": 1.0, "seed": 3, "logprobs": 4},
        {"presence_penalty": 2.0, "min_tokens": 4},
        {},
    ]
    expected = texts_of(Runs(tiny, knows_ends=False), *requests)
    runs = Runs(tiny)
    assert texts_of(runs, *requests, *requests) == expected * 2
    assert projections == []


def test_a_prompt_that_ends_several_times_at_once_has_its_logits_kept_once(
    tiny: NativeModel, projections: list[int]
) -> None:
    drawn = {"temperature": 1.0, "seed": 1, "max_tokens": 1}
    other = random_ids(2 * BLOCK_SIZE, 128, 3)
    runs = Runs(tiny)
    runs.known._logits = KeptLogits(max_bytes=2 * 4 * 128)  # of two prompts
    runs.ask(other, **drawn)
    for seq_id in range(5):
        runs.add(seq_id=seq_id, **drawn)
    runs.ask(seq_id=5, **drawn)
    assert runs.num_passes(other, temperature=1.0) == 0
    assert projections == []


def test_while_all_wait_for_their_grammars_the_worker_does_not_spin(
    tiny: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without a forward pass is over at once, and the next would be like it."""
    runs = Runs(tiny)
    runs.ask()
    allowed = runs.runner._allowed_tokens

    def wait(sequences: list[Sequence], vocab_size: int, result: RunResult) -> Any:
        result.deferred.update(sequence.seq_id for sequence in sequences)
        return allowed(sequences, vocab_size, result)

    runs.add(temperature=1.0)
    monkeypatch.setattr(runs.runner, "_allowed_tokens", wait)
    for _ in range(2):
        assert runs.engine.step() == []
        assert not runs.engine.made_progress
    monkeypatch.undo()
    assert len(runs.engine.step()) == 1
    assert runs.engine.made_progress


def test_a_copy_that_fails_is_made_when_its_batch_is_tried_again(
    tiny: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_ids(3 * BLOCK_SIZE - 1, 128, seed) for seed in range(3)]
    expected = [texts_of(Runs(tiny), {"prompt": prompt})[0] for prompt in prompts]
    runs = Runs(tiny)
    for prompt in prompts[1:]:
        runs.ask(prompt)
    num_tries = 0
    copy_blocks = runs.cache.copy_blocks

    def fails_at_second(copies: list[DeviceCopy]) -> None:
        nonlocal num_tries
        num_tries += len(copies)
        if copies and num_tries == 2:
            raise MemoryError
        copy_blocks(copies)

    monkeypatch.setattr(runs.cache, "copy_blocks", fails_at_second)
    for seq_id, prompt in enumerate(prompts):  # the first is new, so all run
        runs.add(prompt, seq_id)
    texts: list[list[Any]] = [[], [], []]
    while runs.engine.has_unfinished:
        for output in runs.engine.step():
            texts[output.seq_id].append(output.token)
    assert texts == expected
    assert num_tries == 3


def test_its_duration_teaches_nothing(tiny: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tiny)
    runs.ask()
    noted: list[int] = []
    monkeypatch.setattr(runs.scheduler.pace, "note", lambda *args: noted.append(args[0]))
    runs.ask(max_tokens=3)
    assert noted == [1, 1]


@pytest.mark.parametrize("num_tokens", range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2))
@pytest.mark.parametrize("answered", [1, BLOCK_SIZE + 1])
def test_a_prompt_that_ends_inside_a_block(
    tiny: NativeModel, num_tokens: int, answered: int
) -> None:
    """Whether its answer filled the block or not."""
    prompt = PROMPT[:num_tokens]
    plain, runs = Runs(tiny, knows_ends=False), Runs(tiny)
    drawn = {"temperature": 1.0, "seed": 8, "max_tokens": 7}
    expected = plain.ask(prompt, **drawn)
    runs.ask(prompt, max_tokens=answered)
    outputs = runs.ask(prompt, **drawn)
    assert [output.token for output in outputs] == [output.token for output in expected]
    assert outputs[0].num_cached_tokens == num_tokens - 1
    assert runs.num_passes(prompt) == 0
    # Others that begin as it does, or as its answer does, are not taken for it.
    for other in (prompt[:-1], [*prompt[:-1], (prompt[-1] + 1) % 128], [*prompt, 3]):
        expected = plain.ask(other, **drawn)
        assert [o.token for o in runs.ask(other, **drawn)] == [o.token for o in expected]


def test_a_turn_that_is_asked_again_in_another_way(tiny: NativeModel) -> None:
    """An answer's end is no prompt's end until it was asked for as one."""
    runs = Runs(tiny)
    answer = [o.token.token_id for o in runs.ask(max_tokens=9) if o.token is not None]
    longer = [*PROMPT, *answer[:6]]
    assert runs.num_passes(longer) == 1
    assert runs.model.num_rows[-1] == 1  # its keys and values are there, its state is not
    assert runs.num_passes(longer) == 0


@pytest.mark.parametrize("form", ["Gemma 3", "Gemma 4 (E2B)", "Gemma 4 (26B-A4B)"])
def test_sliding_windows(tmp_path: Path, native: NativeLibrary, form: str) -> None:
    if form == "Gemma 3":
        write_tiny_windowed(tmp_path, WINDOW)
    else:
        write_tiny_model(form, tmp_path, torch.float32, sliding_window=WINDOW)
    model = make_native(load_model(tmp_path, torch.float32).model, native)
    options: dict[str, Any] = {"windows": [(WINDOW, 64)]}
    plain, runs = Runs(model, knows_ends=False, **options), Runs(model, **options)
    for num_tokens in (3 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE - 1):
        prompt = PROMPT[:num_tokens]
        expected = [o.token for o in plain.ask(prompt, max_tokens=9)]
        assert [o.token for o in runs.ask(prompt, max_tokens=9)] == expected
        num_passes = len(runs.model.num_rows)
        assert [o.token for o in runs.ask(prompt, max_tokens=9)] == expected
        assert len(runs.model.num_rows) == num_passes + 8


def test_the_step_log_tells(tiny: NativeModel, tmp_path: Path) -> None:
    runs = Runs(tiny)
    runs.engine._step_log = StepLog(tmp_path / "steps.jsonl")
    runs.ask(seq_id=1, max_tokens=2)
    runs.ask(seq_id=2, max_tokens=2)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["known_ends"] for line in lines] == [[], [], [2], []]


class TestScheduler:
    """What is said of the keys and values of a prompt's last token."""

    def test_they_are_present_until_the_blocks_are_given_back(self) -> None:
        scheduler = make_scheduler(block_size=4, prefix_eviction=LruPolicy())
        scheduler.add(make_sequence(1, 8, max_tokens=4))
        while scheduler.has_unfinished:
            run_step(scheduler)
        again = make_sequence(2, 8, prompt_seed=1, max_tokens=4)
        scheduler.add(again)
        (item,) = scheduler.schedule().scheduled
        assert item.only_lacks_logits
        scheduler._preempt(again)
        assert again.num_present_tokens == 0
        assert not item.only_lacks_logits

    def test_the_token_that_follows_is_a_decode(self) -> None:
        scheduler = make_scheduler(block_size=4, prefix_eviction=LruPolicy())
        for seq_id in (1, 2):
            scheduler.add(make_sequence(seq_id, 8, prompt_seed=1, max_tokens=4))
            only_logits = []
            while scheduler.has_unfinished:
                (item,) = run_step(scheduler).output.scheduled
                only_logits.append(item.only_lacks_logits)
        # What is said of the item is said after its step.
        assert not any(only_logits)
