"""A client as `vllm bench serve` is one: streamed completions and chats at a rate, with the usage
in the last chunk. It prints what it measured as JSON; it fails when a count does not add up.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

URL = os.environ["SHOAL_CHECK_URL"] + "/v1"
HEADERS = {"authorization": f"Bearer {os.environ['SHOAL_CHECK_KEY']}"}
NUM_REQUESTS, OUTPUT_TOKENS, RATE_PER_S = 16, 24, 8.0


@dataclass
class Measured:
    """Of one request; times in seconds."""

    first_token_s: float = 0.0
    between_tokens_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


def body(idx: int, chat: bool) -> dict[str, Any]:
    question = f"Tell a story about the number {idx}."
    prompt = {"messages": [{"role": "user", "content": [{"type": "text", "text": question}]}]}
    return {
        "model": os.environ["SHOAL_CHECK_MODEL"],
        **(prompt if chat else {"prompt": question}),
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_completion_tokens" if chat else "max_tokens": OUTPUT_TOKENS,
        "logprobs": None,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(client: httpx.AsyncClient, idx: int, chat: bool) -> Measured:
    measured = Measured()
    path = "/chat/completions" if chat else "/completions"
    started = last = time.perf_counter()
    headers = {**HEADERS, "x-request-id": f"bench-{chat}-{idx}"}
    async with client.stream("POST", URL + path, json=body(idx, chat), headers=headers) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if choices := chunk.get("choices"):
                now = time.perf_counter()
                choice = choices[0]
                text = choice["delta"].get("content") if chat else choice["text"]
                if text and not measured.first_token_s:
                    measured.first_token_s = now - started
                elif text:
                    measured.between_tokens_s.append(now - last)
                measured.text += text or ""
                last = now
            if usage := chunk.get("usage"):
                measured.output_tokens = usage["completion_tokens"]
                measured.prompt_tokens = usage["prompt_tokens"]
    return measured


async def bench(chat: bool) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=120) as client:
        tasks = []
        started = time.perf_counter()
        for idx in range(NUM_REQUESTS):
            tasks.append(asyncio.create_task(ask(client, idx, chat)))
            await asyncio.sleep(1 / RATE_PER_S)
        answers = await asyncio.gather(*tasks)
        took = time.perf_counter() - started
    assert all(answer.output_tokens == OUTPUT_TOKENS for answer in answers), answers
    assert all(answer.text and answer.first_token_s and answer.prompt_tokens for answer in answers)
    gaps = [gap for answer in answers for gap in answer.between_tokens_s]
    return {
        "requests_per_s": round(len(answers) / took, 2),
        "output_tokens_per_s": round(sum(answer.output_tokens for answer in answers) / took, 1),
        "median_ttft_ms": round(statistics.median(a.first_token_s for a in answers) * 1000, 1),
        "median_itl_ms": round(statistics.median(gaps) * 1000, 1),
    }


if __name__ == "__main__":
    for chat in (False, True):
        print(
            json.dumps({"endpoint": "chat" if chat else "completions"} | asyncio.run(bench(chat)))
        )
    sys.exit(0)
