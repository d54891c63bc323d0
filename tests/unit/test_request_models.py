"""Request bodies of hostile size are refused without an error object for each of their parts."""

from typing import Any

import pytest

from shoal.client.errors import ShoalError
from shoal.client.openai.prompts import read_prompts
from shoal.client.openai.request_models import ChatBody, CompletionBody, parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MANY = {f"x{i}": 0 for i in range(100_000)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (MANY, "x0"),
        ({"stream": True, "stream_options": MANY}, "stream_options.x0"),
        ({"messages": [[]] * 100_000}, "messages[0]"),
        ({"stop": [1] * 100_000}, "stop[0]"),
        ({"stop_token_ids": ["a"] * 100_000}, "stop_token_ids[0]"),
    ],
)
def test_one_short_error_for_many_faults(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ShoalError) as caught:
        parse_body(ChatBody, {**CHAT, **fields})
    assert caught.value.param == param
    assert len(caught.value.message) < 200


def test_long_token_lists_are_taken() -> None:
    (prompt,) = read_prompts([7] * 1_000_000, 4)
    assert prompt.input_ids is not None
    assert len(prompt.input_ids) == 1_000_000


def test_long_names_are_cut() -> None:
    with pytest.raises(ShoalError) as caught:
        parse_body(CompletionBody, {"model": "m", "prompt": "a", "y" * 100_000: 1})
    assert len(caught.value.message) < 200


def test_a_kv_policy_and_its_budget_pass() -> None:
    values = {"kv_policy": "h2o", "kv_budget": 1024}
    assert parse_body(CompletionBody, {"model": "m", "prompt": "a", **values}).sampling() == values
    for name, value in (("kv_policy", 1), ("kv_budget", "big")):
        with pytest.raises(ShoalError) as caught:
            parse_body(ChatBody, {**CHAT, name: value})
        assert (caught.value.param, caught.value.status) == (name, 400)


def test_whole_numbers_serve_as_floats() -> None:
    body = parse_body(ChatBody, {**CHAT, "temperature": 1, "top_p": 1})
    assert body.sampling() == {"temperature": 1.0, "top_p": 1.0}
