"""Requests for several choices: one prompt, n sequences, and one stream of chunks."""

from collections import defaultdict

import pytest
from scripted_worker import ScriptedWorkers, WorkerScript, scripted_text
from service_runs import PROMPT, Collector, aborted, ask, serving, until

from shoal.backend.chunk import Chunk, join_by_choice, join_chunks
from shoal.backend.intake import RawRequest
from shoal.backend.messages import AddSequence
from shoal.scheduler.errors import RequestError
from shoal.scheduler.sampling_params import MAX_CHOICES, SamplingParams
from shoal.scheduler.sequence import FinishReason


def by_index(sink: Collector) -> dict[int | None, Chunk]:
    sink.wait()
    chunks = defaultdict(list)
    for chunk in sink.chunks:
        chunks[chunk.index].append(chunk)
    return {index: join_chunks(same) for index, same in chunks.items()}


def added(workers: ScriptedWorkers) -> list[AddSequence]:
    return [
        message
        for worker in workers.spawned
        for message in worker.received
        if isinstance(message, AddSequence)
    ]


def test_each_choice_has_its_own_answer_and_the_prompt_counts_once() -> None:
    workers = ScriptedWorkers()
    with serving(workers) as running:
        sink = ask(running, max_tokens=7, n=3)
        answers = by_index(sink)
        assert sorted(answers) == [0, 1, 2]
        for answer in answers.values():
            assert answer.text == scripted_text(5, 7)
            assert answer.num_new_tokens == 7
            assert answer.num_input_tokens == 5
            assert answer.finish_reason is FinishReason.LENGTH
        assert [chunk.final for chunk in sink.chunks].count(True) == 1
        counts = running.counts()
        assert (counts.prompt_tokens, counts.generation_tokens) == (5, 21)
        assert counts.requests == {"length": 1}
    first, *others = added(workers)
    assert first.fork_of is None
    assert {message.fork_of for message in others} == {first.seq_id}
    assert len({message.sampling.seed for message in (first, *others)}) == 3
    assert all(message.sampling.n == 1 for message in (first, *others))


def test_choices_can_be_had_again_and_the_first_is_the_only_one_of_a_request_for_one() -> None:
    sampling = SamplingParams(n=4, seed=7, temperature=0.5)
    seeds = [sampling.for_choice(index).seed for index in range(4)]
    assert seeds == [sampling.for_choice(index).seed for index in range(4)]
    assert sampling.for_choice(0) == SamplingParams(n=1, seed=7, temperature=0.5)
    assert len(set(seeds)) == 4
    assert seeds[1:] != [SamplingParams(seed=8).for_choice(index).seed for index in (1, 2, 3)]


@pytest.mark.parametrize("n", [0, MAX_CHOICES + 1, 1.5, True])
def test_the_number_of_choices_is_bounded(n: object) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams.from_dict({"n": n})
    assert error.value.param == "n"


def test_choices_may_run_one_after_another() -> None:
    workers = ScriptedWorkers(WorkerScript(max_num_seqs=1))
    with serving(workers) as running:
        sink = ask(running, max_tokens=6, n=3)
        answers = by_index(sink)
        assert {answer.text for answer in answers.values()} == {scripted_text(5, 6)}
        ends = [chunk for chunk in sink.chunks if chunk.finish_reason]
        assert [(end.index, end.final) for end in ends] == [(0, False), (1, False), (2, True)]


def test_a_stop_string_ends_its_choice_alone_and_the_worker_hears_of_it() -> None:
    workers = ScriptedWorkers()
    with serving(workers) as running:
        text = scripted_text(5, 20)
        answers = by_index(ask(running, max_tokens=400, n=2, stop=text[3:6]))
        assert [answer.text for answer in answers.values()] == [text[:3]] * 2
        until(lambda: not workers.last.sequences)


def test_a_cancel_ends_all_choices() -> None:
    workers = ScriptedWorkers()
    with serving(workers) as running:
        sink = Collector()
        raw = RawRequest(text_input=PROMPT, stream=True, parameters={"max_tokens": 400, "n": 3})
        seq_id = running.submit(raw, sink)
        assert sink.started.wait(20)
        running.cancel(seq_id)
        assert sink.ended.wait(20)
        assert sink.chunks[-1].finish_reason is FinishReason.CANCELLED
        until(lambda: not workers.last.sequences)
        assert len(set(aborted(workers.last))) == 3


def test_an_error_of_one_choice_is_the_requests() -> None:
    script = WorkerScript(fail_on=lambda message: message.fork_of is not None)
    workers = ScriptedWorkers(script)
    with serving(workers) as running:
        sink = ask(running, max_tokens=400, n=2)
        assert sink.ended.wait(20)
        assert sink.chunks[-1].error is not None
        until(lambda: not workers.last.sequences)
        assert running.counts().requests == {"error": 1}


def test_a_queue_without_room_for_all_takes_none() -> None:
    workers = ScriptedWorkers(WorkerScript(max_num_seqs=1))
    workers.running.clear()
    with serving(workers, max_queued_requests=3) as running:
        first = ask(running, max_tokens=4, n=3)
        until(lambda: len(added(workers)) == 1)  # and two are queued
        refused = ask(running, max_tokens=4, n=2)
        assert refused.ended.wait(20)
        assert refused.chunks[-1].error is not None
        assert refused.chunks[-1].error.status == 429
        workers.running.set()
        assert sorted(by_index(first)) == [0, 1, 2]
        assert ask(running, max_tokens=4, n=3).ended.wait(20)


def test_more_choices_than_can_ever_queue_are_refused_for_good() -> None:
    with serving(ScriptedWorkers(), max_queued_requests=3) as running:
        refused = ask(running, max_tokens=4, n=4)
        assert refused.ended.wait(20)
        assert refused.chunks[-1].error is not None
        assert (refused.chunks[-1].error.status, refused.chunks[-1].error.param) == (400, "n")


def test_an_empty_queue_takes_all_choices_of_a_prompt_whatever_its_bound_in_tokens() -> None:
    with serving(ScriptedWorkers(), max_queued_tokens=8) as running:
        for _ in range(2):
            assert sorted(by_index(ask(running, max_tokens=4, n=3))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("limit", "param"), [({"max_requests": 2}, "n"), ({"max_tokens": 26}, "max_tokens")]
)
def test_choices_that_a_tenant_may_never_have_are_refused_for_good(
    limit: dict[str, int], param: str
) -> None:
    with serving(ScriptedWorkers(), tenants={"*": limit}) as running:
        refused = ask(running, max_tokens=4, n=3)
        assert refused.ended.wait(20)
        error = refused.chunks[-1].error
        assert error is not None
        assert (error.status, error.code, error.param) == (400, "tenant_limit", param)
        assert error.retry_after_ms is None
        assert sorted(by_index(ask(running, max_tokens=4, n=2))) == [0, 1]


def test_all_choices_survive_a_dead_worker() -> None:
    workers = ScriptedWorkers(
        WorkerScript(die_on=lambda worker: worker.num_steps == 3), WorkerScript()
    )
    with serving(workers) as running:
        answers = by_index(ask(running, max_tokens=30, n=3))
        assert {answer.text for answer in answers.values()} == {scripted_text(5, 30)}
        assert len(workers.spawned) == 2


def test_what_piles_up_is_joined_by_choice() -> None:
    chunks = [Chunk("a", index=0), Chunk("x", index=1), Chunk("b", index=0)]
    last = Chunk("c", finish_reason=FinishReason.STOP, index=0, is_last=False)
    joined = join_by_choice([*chunks, last])
    assert [(chunk.index, chunk.text, chunk.final) for chunk in joined] == [
        (0, "abc", False),
        (1, "x", False),
    ]
    error = Chunk.of_error(RequestError("no"))
    assert join_by_choice([*chunks, error]) == [error]
    assert join_by_choice([]) == [Chunk()]
