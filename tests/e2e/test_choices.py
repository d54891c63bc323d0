"""Several choices of one prompt, through the whole stack."""

from typing import Any

import httpx
import openai
from served import MODEL, Served

PROMPT = "Tell me what you know about rivers. " * 12
SAMPLING = {"temperature": 1.0, "seed": 11, "max_tokens": 24}


def complete(served: Served, n: int, stream: bool = False) -> tuple[list[str], Any]:
    with openai.OpenAI(base_url=f"{served.openai_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            n=n,
            stream=stream,
            stream_options={"include_usage": True} if stream else openai.omit,
            extra_body={"ignore_eos": True},
            **SAMPLING,
        )
        if not stream:
            return [choice.text for choice in answer.choices], answer.usage
        texts, usage = [""] * n, None
        for chunk in answer:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts, usage


def test_choices_can_be_had_again_streamed_or_not(served: Served) -> None:
    alone, usage = complete(served, 1)
    start = len(served.steps())
    texts, together = complete(served, 4)
    assert texts[0] == alone[0]
    assert len(set(texts)) == 4
    assert together.prompt_tokens == usage.prompt_tokens
    assert together.completion_tokens == 4 * usage.completion_tokens
    assert complete(served, 4, stream=True)[0] == texts
    assert complete(served, 3)[0] == texts[:3]
    served.wait_idle()
    computed = sum(item["num_tokens"] for step in served.steps()[start:] for item in step["seqs"])
    assert computed < 3 * usage.prompt_tokens  # of 11 prompts' worth


def test_choices_over_plain_http(served: Served) -> None:
    body = {
        "text_input": "The sea is",
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "parameters": {**SAMPLING, "ignore_eos": True, "n": 2},
    }
    answer = httpx.post(f"{served.triton_url}/v2/models/{MODEL}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["index"] == [0, 1]
    assert len(set(found["text_output"])) == 2
    assert found["finish_reason"] == ["length", "length"]
