import json

import pytest
from builders import EOS, fake_token, make_sampling, make_scheduler

from shoal.backend.engine import Engine, EngineLimits, RunResult
from shoal.backend.engine_config import ConfigError
from shoal.backend.messages import AddSequence
from shoal.backend.step_log import StepLog
from shoal.scheduler.sequence import FinishReason

LIMITS = EngineLimits(vocab_size=10_000, max_model_len=1024, eos_token_ids=frozenset({EOS}))


class FakeModelRunner:
    """Gives each sequence the builders' fake tokens; sequences in ``broken`` fail."""

    def __init__(self):
        self.broken = set()
        self.num_steps = 0
        self.num_tokens = 0

    def run(self, output):
        self.num_steps += 1
        self.num_tokens += output.num_tokens
        assert output.num_tokens > 0
        result = RunResult({}, {})
        for item in output.scheduled:
            sequence = item.sequence
            if sequence.seq_id in self.broken:
                result.failed[sequence.seq_id] = "broken"
            elif item.samples:
                token = fake_token(sequence.seq_id, sequence.num_output_tokens)
                result.sampled[sequence.seq_id] = token
        return result


@pytest.fixture
def runner():
    return FakeModelRunner()


def make_engine(runner, step_log=None, **scheduler):
    return Engine(make_scheduler(**scheduler), runner, LIMITS, step_log)


def add(engine, seq_id, num_prompt_tokens=16, num_output_tokens=0, **sampling):
    outputs = [fake_token(seq_id, i).token_id for i in range(num_output_tokens)]
    tokens = list(range(10, 10 + num_prompt_tokens)) + outputs
    engine.add(AddSequence(seq_id, tokens, num_prompt_tokens, make_sampling(**sampling)))


def run_all(engine, max_steps=1000):
    """Step until nothing is left; all outputs by seq_id."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.seq_id, []).append(output)
    raise AssertionError("the engine did not finish")


def token_ids(outputs):
    return [output.token.token_id for output in outputs if output.token]


def test_every_sequence_gets_its_tokens_and_one_finish(runner):
    engine = make_engine(runner)
    for seq_id in range(12):
        add(engine, seq_id, num_prompt_tokens=5 + 9 * seq_id, max_tokens=1 + seq_id)
    outputs = run_all(engine)
    for seq_id in range(12):
        expected = [fake_token(seq_id, i).token_id for i in range(1 + seq_id)]
        assert token_ids(outputs[seq_id]) == expected
        finishes = [output.finish_reason for output in outputs[seq_id] if output.finish_reason]
        assert finishes == [FinishReason.LENGTH]
    assert engine.status.free_blocks == 64
    assert engine.status.step == runner.num_steps


def test_a_replayed_sequence_goes_on_where_it_was(runner):
    engine = make_engine(runner)
    add(engine, 7, num_output_tokens=3, max_tokens=6)
    (outputs,) = run_all(engine).values()
    assert [output.output_index for output in outputs] == [3, 4, 5]
    assert token_ids(outputs) == [fake_token(7, i).token_id for i in (3, 4, 5)]


def test_abort_mid_way_frees_the_blocks_and_says_nothing_more(runner):
    engine = make_engine(runner)
    add(engine, 1, max_tokens=50)
    add(engine, 2, max_tokens=5)
    engine.step()
    engine.step()
    engine.abort(1)
    engine.abort(1)
    engine.abort(99)
    assert set(run_all(engine)) == {2}
    assert engine.status.free_blocks == 64


def test_a_failed_sequence_fails_alone(runner):
    engine = make_engine(runner)
    for seq_id in (1, 2, 3):
        add(engine, seq_id, max_tokens=6)
    engine.step()
    runner.broken = {2}
    outputs = run_all(engine)
    assert outputs[2][-1].finish_reason is FinishReason.ERROR
    assert outputs[2][-1].error == "broken"
    assert outputs[2][-1].token is None
    assert all(outputs[i][-1].finish_reason is FinishReason.LENGTH for i in (1, 3))
    assert engine.status.free_blocks == 64


@pytest.mark.parametrize(
    ("tokens", "num_prompt_tokens"),
    [([], 0), ([5], 0), ([5], 2), ([5, 10_000], 2), ([5, -1], 2), ([5] * 1024, 1024)],
)
def test_what_cannot_run_is_refused_with_an_error_output(runner, tokens, num_prompt_tokens):
    engine = make_engine(runner)
    add(engine, 1)
    engine.add(AddSequence(5, tokens, num_prompt_tokens, make_sampling()))
    outputs = run_all(engine)
    (refused,) = outputs[5]
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error
    assert len(token_ids(outputs[1])) == 8


def test_a_refused_sequence_alone_is_answered_at_once(runner):
    engine = make_engine(runner)
    engine.add(AddSequence(5, [], 0, make_sampling()))
    assert engine.has_unfinished
    assert [output.seq_id for output in engine.step()] == [5]
    assert engine.made_progress
    assert not engine.has_unfinished


def test_a_second_add_of_a_live_sequence_changes_nothing(runner):
    engine = make_engine(runner)
    add(engine, 1, max_tokens=4)
    engine.step()
    add(engine, 1, max_tokens=4)
    assert len(run_all(engine)[1]) == 3


def test_a_pool_too_small_for_all_preempts_and_still_finishes(runner):
    engine = make_engine(runner, num_blocks=6, block_size=4)
    for seq_id in range(4):
        add(engine, seq_id, num_prompt_tokens=4, max_tokens=16)
    outputs = run_all(engine)
    for seq_id in range(4):
        assert token_ids(outputs[seq_id]) == [fake_token(seq_id, i).token_id for i in range(16)]
    assert engine.status.num_preemptions > 0
    assert engine.status.free_blocks == 6


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_step_log_has_one_line_a_step(runner, tmp_path):
    path = tmp_path / "logs" / "steps.jsonl"
    engine = make_engine(runner, StepLog(path), max_num_batched_tokens=32)
    add(engine, 1, num_prompt_tokens=40, max_tokens=2)
    engine.step()
    add(engine, 2, num_prompt_tokens=4, max_tokens=50)
    engine.step()
    engine.abort(2)
    run_all(engine)
    lines = read_log(path)
    assert [line["step"] for line in lines] == list(range(1, runner.num_steps + 1))
    assert [line["added"] for line in lines[:2]] == [[1], [2]]
    first = {"seq_id": 1, "num_tokens": 32, "num_computed": 0, "prompt": 40, "samples": False}
    assert lines[0]["seqs"] == [first]
    assert {"seq_id": 2, "num_tokens": 4, "num_computed": 0, "prompt": 4, "samples": True} in lines[
        1
    ]["seqs"]
    assert lines[2]["aborted"] == [2]
    assert lines[-1]["finished"] == [1]
    assert lines[-1]["free_blocks"] == 64
    assert [line["preempted"] for line in lines] == [[]] * len(lines)


def test_a_new_short_prompt_has_its_first_token_within_two_steps_of_arrival(runner, tmp_path):
    path = tmp_path / "steps.jsonl"
    engine = make_engine(runner, StepLog(path), num_blocks=512, max_num_batched_tokens=64)
    for seq_id in range(4):
        add(engine, seq_id, max_tokens=500)
    for _ in range(10):
        engine.step()
    add(engine, 8, num_prompt_tokens=900, max_tokens=5)  # and while a long prompt is prefilled
    engine.step()
    add(engine, 9, num_prompt_tokens=16, max_tokens=5)
    run_all(engine)
    lines = read_log(path)
    (arrival,) = [line["step"] for line in lines if 9 in line["added"]]
    first_token = next(
        line["step"]
        for line in lines
        if any(seq["seq_id"] == 9 and seq["samples"] for seq in line["seqs"])
    )
    assert first_token - arrival < 2


def test_a_step_log_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="step_log"):
        StepLog(tmp_path / "file" / "steps.jsonl")


def test_choices_of_one_prompt_compute_it_once(runner):
    engine = make_engine(runner, max_num_batched_tokens=64)
    prompt = list(range(10, 210))
    for seq_id in range(4):
        fork_of = 0 if seq_id else None
        sampling = make_sampling(max_tokens=3)
        engine.add(AddSequence(seq_id, prompt, 200, sampling, fork_of=fork_of))
    outputs = run_all(engine)
    assert {seq_id: len(token_ids(items)) for seq_id, items in outputs.items()} == dict.fromkeys(
        range(4), 3
    )
    assert runner.num_tokens == 200 + 3 + 4 * 2


def test_a_choice_whose_first_is_gone_is_computed_by_itself(runner):
    engine = make_engine(runner)
    engine.add(AddSequence(5, list(range(10, 60)), 50, make_sampling(max_tokens=2), fork_of=4))
    assert len(token_ids(run_all(engine)[5])) == 2
