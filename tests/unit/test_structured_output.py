"""Grammars from requests, and text that must follow them."""

import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest
import torch
from json_schemas import all_schemas
from text_builders import EOS, make_tokenizer

from shoal.backend.grammar_compiler import GrammarCompiler, GrammarError
from shoal.backend.grammar_matcher import GrammarMatchers, StepMasks
from shoal.backend.sampler import sample
from shoal.backend.structured_output import FIELDS, take_grammar
from shoal.scheduler.errors import RequestError
from shoal.scheduler.outputs import SampledToken
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.sequence import Sequence

TOKENIZER = make_tokenizer()
VOCAB = 272  # padded, as models' are
MAX_TOKENS = 400
SCHEMAS = all_schemas()


def make_matchers(max_matchers: int = 8) -> GrammarMatchers:
    return GrammarMatchers(make_compiler(), max_matchers)


def make_compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: TOKENIZER, VOCAB, [EOS])


@pytest.fixture(scope="module")
def matchers() -> GrammarMatchers:
    return make_matchers()


def make_sequence(grammar: str | None, seed: int, seq_id: int = 1) -> Sequence:
    sampling = SamplingParams(temperature=1.0, seed=seed, grammar=grammar)
    return Sequence(seq_id, [1, 2, 3], 3, sampling, eos_token_ids=frozenset({EOS}))


def random_logits(seed: int, step: int) -> torch.Tensor:
    """A model that knows nothing, but is fond of closing what is open."""
    generator = torch.Generator().manual_seed(seed * 100_003 + step)
    logits = torch.randn(1, VOCAB, generator=generator)
    logits[0, [ord(char) for char in '"]}']] += 3.0
    logits[0, EOS] += 3.0
    return logits


def masks_of(matchers: GrammarMatchers, sequence: Sequence) -> StepMasks:
    """Of the first step in which the sequence need not wait."""
    while (masks := matchers.masks([sequence], VOCAB)).waiting:
        time.sleep(0.001)
    return masks


def allowed_tokens(matchers: GrammarMatchers, sequence: Sequence) -> torch.Tensor:
    """bool [vocab_size]; raises GrammarError."""
    masks = masks_of(matchers, sequence)
    if masks.broken:
        raise GrammarError(masks.broken[sequence.seq_id])
    return masks.allowed.of(sequence.seq_id, VOCAB)


def next_token(matchers: GrammarMatchers, sequence: Sequence) -> int:
    logits = random_logits(sequence.sampling.seed or 0, sequence.num_output_tokens)
    allowed = masks_of(matchers, sequence).allowed
    (token,) = sample(logits, [sequence], allowed)
    assert isinstance(token, SampledToken), token
    return token.token_id


def generate(matchers: GrammarMatchers, grammar: str, seed: int, seq_id: int = 1) -> str | None:
    """Sampled text; None when it was not finished in time."""
    sequence = make_sequence(grammar, seed, seq_id)
    for _ in range(MAX_TOKENS):
        token_id = next_token(matchers, sequence)
        if token_id == EOS:
            return TOKENIZER.decode(sequence.token_ids[3:])
        sequence.token_ids.append(token_id)
    return None


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        take_grammar(fields)
    assert caught.value.status == 400
    return caught.value


def grammar_of(**fields: Any) -> str:
    grammar = take_grammar(fields)
    assert grammar is not None
    return grammar


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def test_every_finished_text_follows_its_schema(matchers: GrammarMatchers) -> None:
    assert len(SCHEMAS) >= 200
    num_finished = 0
    for seed, schema in enumerate(SCHEMAS):
        grammar = grammar_of(response_format=json_schema(schema))
        text = generate(matchers, grammar, seed, seq_id=seed)
        if text is not None:
            num_finished += 1
            jsonschema.validate(json.loads(text), schema)
    assert num_finished > 0.95 * len(SCHEMAS)


@pytest.mark.parametrize("text", ["say <end> now", "<s>a", "</s>", "a</s>"])
def test_what_reads_like_a_special_token_is_text(matchers: GrammarMatchers, text: str) -> None:
    assert generate(matchers, grammar_of(guided_choice=[text]), seed=1) == text
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    schema["additionalProperties"] = False
    found = generate(matchers, grammar_of(guided_json=schema), seed=2)
    assert found is not None
    assert json.loads(found) == {text: text}


def grammar_or_error(schema: Any) -> tuple[str | None, RequestError | None]:
    try:
        return grammar_of(guided_json=schema), None
    except RequestError as error:
        return None, error


# Of each keyword of JSON Schema, an instance that breaks it.
KEYWORDS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "minItems": 2, "items": {"type": "null"}}, [None]),
    ({"type": "array", "maxItems": 1, "items": {"type": "null"}}, [None, None]),
    ({"type": "array", "uniqueItems": True}, [1, 1]),
    ({"type": "array", "contains": {"const": 1}}, [2]),
    ({"type": "array", "prefixItems": [{"const": 1}]}, [2]),
    ({"type": "array", "unevaluatedItems": False}, [2]),
    ({"type": "string", "maxLength": 2}, "abc"),
    ({"type": "string", "minLength": 2}, "a"),
    ({"type": "string", "pattern": "^a$"}, "b"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aaa"),
    ({"type": "string", "format": "date"}, "today"),
    ({"type": "integer", "minimum": 3}, 2),
    ({"type": "integer", "maximum": 3}, 4),
    ({"type": "number", "exclusiveMinimum": 3}, 3),
    ({"type": "number", "exclusiveMaximum": 3}, 3),
    ({"type": "integer", "multipleOf": 3}, 4),
    ({"type": "object", "required": ["a"]}, {}),
    ({"type": "object", "minProperties": 2}, {"a": 1}),
    ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
    ({"type": "object", "additionalProperties": False}, {"a": 1}),
    ({"type": "object", "unevaluatedProperties": False}, {"a": 1}),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, {"b": 1}),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, {"a": 1}),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
    ({"not": {"type": "string"}}, "a"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, 2),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, 3),
    ({"anyOf": [{"const": 1}, {"const": 2}]}, 3),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, 1),
    ({"enum": [1, 2]}, 3),
    ({"const": 1}, 2),
    ({"type": "null"}, 1),
]


@pytest.mark.parametrize(("schema", "breaks"), KEYWORDS)
def test_a_keyword_is_enforced_or_refused_by_name(
    matchers: GrammarMatchers, schema: dict[str, Any], breaks: Any
) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    assert not validator.is_valid(breaks) or "dependencies" in schema  # of an older draft
    grammar, error = grammar_or_error(schema)
    if error is not None:
        assert error.code == "unsupported_grammar"
        assert any(name in error.message for name in schema), error.message
        return
    sequence = make_sequence(grammar, 0, seq_id=1000)
    for byte in [*json.dumps(breaks).encode(), EOS]:
        try:
            allowed = allowed_tokens(matchers, sequence)
        except GrammarError:
            return
        if not allowed[byte]:
            return
        sequence.token_ids.append(byte)
    pytest.fail(f"{schema} let {breaks} pass")


def test_padding_of_the_vocabulary_is_never_allowed(matchers: GrammarMatchers) -> None:
    allowed = allowed_tokens(matchers, make_sequence(grammar_of(guided_regex=".*"), 0, 900))
    assert allowed[ord("a")]
    assert not allowed[260:].any()


def test_space_between_tokens_is_bounded(matchers: GrammarMatchers) -> None:
    sequence = make_sequence(grammar_of(response_format={"type": "json_object"}), 0, seq_id=1001)
    for _ in range(8):
        sequence.token_ids.append(ord(" "))
    sequence.token_ids[3:] = [ord("{"), *[ord(" ")] * 8]
    assert not allowed_tokens(matchers, sequence)[ord(" ")]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{3}c?"}, "[ab]{3}c?"),
        ({"guided_choice": ["yes", "no", 'say "x"']}, 'yes|no|say "x"'),
        ({"guided_grammar": 'start: "a" ("b" | "c")+'}, "a[bc]+"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")+'}, "a[bc]+"),
    ],
)
def test_other_grammars(matchers: GrammarMatchers, fields: dict[str, Any], pattern: str) -> None:
    grammar = grammar_of(**fields)
    texts = {generate(matchers, grammar, seed, 2000 + seed) for seed in range(12)}
    assert all(text is not None and re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 1


def test_text_is_unconstrained_only_when_asked_for() -> None:
    values = {"response_format": {"type": "text"}, "temperature": 1}
    assert take_grammar(values) is None
    assert values == {"temperature": 1}
    assert take_grammar({"guided_json": None}) is None


DEEP = "(" * 60_000 + "a" + ")" * 60_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"enum": [NaN]}'}, "guided_json"),
        ({"guided_json": '{"maximum": 1e999}'}, "guided_json"),
        ({"guided_json": '{"enum": ["\\ud800"]}'}, "guided_json"),
        ({"guided_json": '{"items":' * 600 + "{}" + "}" * 600}, "guided_json"),
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"guided_json": {"enum": []}}, "guided_json"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
        ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "guided_json"),
        ({"guided_json": {"items": {"pattern": DEEP}}}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 10**40}}, "guided_json"),
        ({"guided_json": {"type": "integer", "exclusiveMaximum": -(2**53) - 1}}, "guided_json"),
        ({"guided_json": {"type": "integer", "multipleOf": -3}}, "guided_json"),
        ({"guided_json": {"type": "object", "patternProperties": {DEEP: {}}}}, "guided_json"),
        ({"guided_regex": DEEP}, "guided_regex"),
        ({"guided_regex": "(" * 100 + ")" * 100}, "guided_regex"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_grammar": "start: " + DEEP}, "guided_grammar"),
        ({"guided_grammar": "root ::= " + DEEP}, "guided_grammar"),
        ({"guided_grammar": "root ::= nowhere"}, "guided_grammar"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert len(error.message) < 600


def test_values_in_a_schema_are_no_schemas(matchers: GrammarMatchers) -> None:
    value = {"pattern": "(", "multipleOf": -1}
    assert generate(matchers, grammar_of(guided_json={"const": value}), 0, 5000) is not None
    grammar_of(guided_json={"type": "integer", "default": value, "minimum": -(2**53)})


def test_a_matcher_that_was_dropped_is_built_again(matchers: GrammarMatchers) -> None:
    grammar = grammar_of(guided_json={"type": "array", "items": {"enum": ["ab", "cd"]}})
    expected = [generate(matchers, grammar, seed, 3000 + seed) for seed in range(6)]
    small = make_matchers(max_matchers=2)
    sequences = [make_sequence(grammar, seed, seed) for seed in range(6)]
    texts: dict[int, str] = {}
    order = random.Random(0)
    while len(texts) < len(sequences):
        sequence = order.choice([item for item in sequences if item.seq_id not in texts])
        token_id = next_token(small, sequence)
        if token_id == EOS:
            texts[sequence.seq_id] = TOKENIZER.decode(sequence.token_ids[3:])
        else:
            sequence.token_ids.append(token_id)
    assert [texts[seed] for seed in range(6)] == expected


def test_output_that_breaks_the_grammar_fails_its_sequence(matchers: GrammarMatchers) -> None:
    sequence = make_sequence(grammar_of(guided_choice=["yes"]), 0, seq_id=4000)
    sequence.token_ids.append(ord("n"))
    with pytest.raises(GrammarError):
        allowed_tokens(matchers, sequence)


def test_a_grammar_is_compiled_once() -> None:
    grammar, compiler = grammar_of(guided_choice=["once"]), make_compiler()
    assert compiler.compile(grammar) is compiler.compile(grammar)


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "((a{300}){300}){300}"])
def test_a_grammar_that_takes_too_much_work_is_no_grammar(pattern: str) -> None:
    with pytest.raises(GrammarError, match="too many"):
        make_compiler().compile(grammar_of(guided_regex=pattern)).result()


def test_field_names_are_those_that_are_read() -> None:
    for name in FIELDS:
        assert refused(**{name: 5}).param in (name, f"{name}.type")
