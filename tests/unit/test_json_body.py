"""Limits on JSON bodies, apart from HTTP."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.errors import ShoalError
from shoal.client.openai.json_body import decode_json, is_deeper_than

TEXT = st.text(alphabet='[]{}",\\:ab\n', max_size=6)
VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=40,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


@given(VALUES, st.integers(1, 6))
def test_depth_is_that_of_the_decoded_value(value: object, limit: int) -> None:
    assert is_deeper_than(value, limit) == (depth(value) > limit)


def test_depth_limit_is_exact() -> None:
    assert decode_json(b"[" * 32 + b"]" * 32, 32)
    with pytest.raises(ShoalError, match="32 levels"):
        decode_json(b"[" * 33 + b"]" * 33, 32)


def test_brackets_in_text_do_not_count() -> None:
    body = orjson.dumps({"a": '[{"' * 1000})
    assert decode_json(body, 32) == {"a": '[{"' * 1000}


def test_where_the_json_is_wrong() -> None:
    with pytest.raises(ShoalError, match="line 2, column") as caught:
        decode_json(b'{"a": 1,\n x}', 32)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"a": NaN}', "a"),
        ('{"logit_bias": {"7": 1e999}}', "logit_bias.7"),
        ('{"a": [1, -Infinity]}', "a"),
        ("NaN", "the value"),
    ],
)
def test_the_number_that_is_none_is_named_with_its_path(body: str, name: str) -> None:
    with pytest.raises(ShoalError) as caught:
        decode_json(body.encode(), 32)
    assert caught.value.param == name
