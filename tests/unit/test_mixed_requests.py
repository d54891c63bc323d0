"""Grammars, tools, choices, log-probabilities, stops, preemptions and dead workers, all at once:
each request gets the answer that it gets alone, and what has ended follows its grammar."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_workers import EngineWorkers, write_checkpoint
from service_runs import Collector
from text_builders import make_tokenizer

from shoal.backend.chunk import Chunk, join_by_choice
from shoal.backend.engine_config import EngineConfig
from shoal.backend.intake import RawRequest
from shoal.backend.service import Service, TextParts
from shoal.backend.text.chat_template import ChatTemplate
from shoal.scheduler.sequence import FinishReason

NUM_REQUESTS = 40
SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99}, "maxItems": 5},
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"enum": ["naïve", "日本", "a"]}]},
    {"type": "string", "pattern": "^[a-c]{2,9}$"},
]
REGEXES = [r"[a-z]{3,20}", r"\d{1,3}(\.\d{1,3}){3}", "(é|日|🤗){1,6}"]
CHOICES = ["yes", "no", "perhaps"]
PLACE = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PLACE}} for name in ("f", "g")
]
Check = Callable[[Chunk], None]


def is_json(schema: dict[str, Any]) -> Check:
    return lambda answer: jsonschema.validate(json.loads(answer.text), schema)


def matches(pattern: str) -> Check:
    return lambda answer: _matches(pattern, answer.text)


def _matches(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def is_choice(answer: Chunk) -> None:
    assert answer.text in CHOICES


def calls_tools(answer: Chunk) -> None:
    assert answer.text == ""
    arguments: dict[int, str] = {}
    for call in answer.tool_calls:
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert arguments
    for text in arguments.values():
        jsonschema.validate(json.loads(text), PLACE)


def structure(draw: random.Random, tools: bool) -> tuple[dict[str, Any], Check | None]:
    """What the answer must follow, and how to tell."""
    kinds = ["schema", "strict", "regex", "choice", "object", "nothing"]
    kind = draw.choice([*kinds, "tools"] if tools else kinds)
    schema = draw.choice(SCHEMAS)
    if kind == "schema":
        return {"guided_json": schema}, is_json(schema)
    if kind == "strict":
        wrapped = {"name": "x", "strict": True, "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": wrapped}}, is_json(schema)
    if kind == "regex":
        pattern = draw.choice(REGEXES)
        return {"guided_regex": pattern}, matches(pattern)
    if kind == "choice":
        return {"guided_choice": CHOICES}, is_choice
    if kind == "tools":
        return {"tools": TOOLS, "tool_choice": "required", "max_tokens": 180}, calls_tools
    if kind == "object":
        return {"response_format": {"type": "json_object"}}, is_json({"type": "object"})
    return {}, None


def random_request(seed: int, tools: bool) -> tuple[RawRequest, Check | None]:
    draw = random.Random(seed)
    fields, check = structure(draw, tools)
    values = {
        "max_tokens": draw.choice([8, 40, 90]),
        "temperature": draw.choice([0, 0.7, 1, 1.5]),
        "seed": seed,
        "n": draw.choice([1, 1, 2, 3]),
        **({"top_p": 0.9} if draw.random() < 0.2 else {}),
        **({"logprobs": draw.choice([0, 2])} if draw.random() < 0.5 else {}),
        **({"repetition_penalty": 1.2} if draw.random() < 0.2 else {}),
        **({"logit_bias": {"34": 2, "257": 1}} if draw.random() < 0.2 else {}),
        **fields,
    }
    if check is None and draw.random() < 0.5:
        values["stop"] = ["e", "zz"]
    words = "x" * draw.randrange(1, 60)
    messages = json.dumps([{"role": "user", "content": words}])
    prompt = {"messages": messages} if "tools" in fields else {"text_input": words}
    sampling = json.dumps(values)
    return RawRequest(**prompt, stream=True, sampling_parameters=sampling), check


@contextmanager
def serving(checkpoint: Path, deaths: tuple[int, ...] = (), **settings: Any) -> Iterator[Any]:
    config = EngineConfig(
        weights=str(checkpoint),
        dtype="float32",
        block_size=8,
        max_num_batched_tokens=256,
        **settings,
    )
    workers = EngineWorkers(config, deaths)
    tokenizer = make_tokenizer()
    text = TextParts(tokenizer, ChatTemplate.from_tokenizer(tokenizer))
    running = Service(config, "tiny", "1", spawn=workers.spawn, text=text)
    running.start()
    try:
        yield running, workers
    finally:
        running.stop(0)


def submit(running: Service, request: RawRequest) -> Collector:
    sink = Collector()
    running.submit(request, sink)
    return sink


def answers(sink: Collector) -> list[Chunk]:
    """By choice."""
    sink.wait()
    found = join_by_choice(
        [chunk for chunk in sink.chunks if chunk.text or chunk.token_ids or chunk.finish_reason]
    )
    return sorted(found, key=lambda answer: answer.index or 0)


def same(answer: Chunk) -> Any:
    """What must not depend on anything else that runs."""
    calls = [(call.index, call.name) for call in answer.tool_calls if call.name]
    arguments = "".join(call.arguments for call in answer.tool_calls)
    said = (answer.text, answer.token_ids, answer.finish_reason, calls, arguments)
    return said, answer.logprobs, answer.index, answer.error


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("tools", [False, True])
def test_all_at_once_and_short_of_memory_is_as_alone(checkpoint: Path, tools: bool) -> None:
    """Tools are told of in words, so that prompts with them are long and few fit at once; without
    them many do, and run out of blocks as they grow."""
    requests = [random_request(seed, tools) for seed in range(NUM_REQUESTS)]
    length = 800 if tools else 160
    with serving(checkpoint, max_model_len=length, num_kv_blocks=400, max_num_seqs=3) as alone:
        expected = [answers(submit(alone[0], request)) for request, _ in requests]
    num_ended = 0
    for (request, check), choices in zip(requests, expected, strict=True):
        for choice in choices:
            assert choice.error is None, (request, choice.error)
            check_logprobs(choice)
            if check is not None and choice.finish_reason is not FinishReason.LENGTH:
                num_ended += 1
                check(choice)
    assert num_ended > NUM_REQUESTS / 3
    with serving(
        checkpoint,
        deaths=(60, 60),
        max_model_len=length,
        num_kv_blocks=length // 8 + 4,
        max_num_seqs=24,
    ) as (together, workers):
        sinks = [submit(together, request) for request, _ in requests]
        found = [answers(sink) for sink in sinks]
        assert len(workers.spawned) == 3
        assert tools or sum(worker.num_preemptions for worker in workers.spawned)
    for mine, theirs, (request, _) in zip(found, expected, requests, strict=True):
        assert [same(choice) for choice in mine] == [same(choice) for choice in theirs], request


def check_logprobs(choice: Chunk) -> None:
    """They are of the text, token by token."""
    if choice.logprobs and not choice.tool_calls:
        assert "".join(entry.sampled.text for entry in choice.logprobs) == choice.text
