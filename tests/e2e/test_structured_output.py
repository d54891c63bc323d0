"""Structured output through the whole stack, by a model that is far too small to give it itself."""

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from json_schemas import all_schemas
from served import Served
from triton_calls import generate

MODEL = "smollm2-135m-instruct"
SHORT = [schema for schema in all_schemas() if "$defs" not in schema and len(str(schema)) < 200]
SCHEMAS = SHORT[:: max(1, len(SHORT) // 32)][:32]


def asking_for(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    formats = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Give me any JSON."}],
        "response_format": formats,
        "temperature": 1.0,
        "max_tokens": 200,
        **more,
    }


async def test_32_schemas_at_once_are_followed(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.openai_url}/v1", api_key="none") as client:

        async def ask(index: int, schema: dict[str, Any]) -> tuple[str, str | None]:
            request = asking_for(schema, seed=index)
            if index % 2:
                answer = await client.chat.completions.create(**request)
                return answer.choices[0].message.content or "", answer.choices[0].finish_reason
            text, reason = "", None
            async for chunk in await client.chat.completions.create(**request, stream=True):
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            return text, reason

        answers = await asyncio.gather(*(ask(*item) for item in enumerate(SCHEMAS)))
    finished = 0
    for (text, reason), schema in zip(answers, SCHEMAS, strict=True):
        if reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(text), schema)
    assert finished >= 0.8 * len(SCHEMAS)


async def test_a_choice_over_grpc_with_logprobs(served: Served) -> None:
    answer = await generate(
        served.grpc_url,
        MODEL,
        "Is the sky blue? Answer: ",
        guided_choice=["yes", "no"],
        temperature=1,
        logprobs=2,
    )
    assert answer.text in ("yes", "no")
    assert answer.finish_reasons == ["stop"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"guided_regex": "(a{1000}){1000}"}, "too many"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    served: Served, fields: dict[str, Any], words: str
) -> None:
    with openai.OpenAI(base_url=f"{served.openai_url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=words):
                client.completions.create(model=MODEL, prompt="a", stream=stream, extra_body=fields)
