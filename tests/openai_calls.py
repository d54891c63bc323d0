"""Plain HTTP on the OpenAI endpoints, whole and streamed answers brought to one form."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from served import MODEL, Served

ROUTES = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


@dataclass
class Choice:
    """One choice; of a stream, all its deltas joined."""

    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # chat's form
    tokens: list[str] = field(default_factory=list)  # completion's form, and its other lists
    token_logprobs: list[float | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    @property
    def finish_reason(self) -> str:
        (reason,) = self.finish_reasons
        return reason

    def add(self, item: dict[str, Any]) -> None:
        said = item.get("message") or item.get("delta") or {}
        self.text += item.get("text") or said.get("content") or ""
        for call in said.get("tool_calls") or []:
            function = call["function"]
            if "name" in function:
                self.calls.append((function["name"], ""))
            name, arguments = self.calls[-1]
            self.calls[-1] = (name, arguments + function["arguments"])
        logprobs = item.get("logprobs") or {}
        self.logprobs += logprobs.get("content") or []
        for name in ("tokens", "token_logprobs", "text_offset"):
            getattr(self, name).extend(logprobs.get(name) or [])
        if item["finish_reason"] is not None:
            self.finish_reasons.append(item["finish_reason"])


@dataclass
class Reply:
    """An answer. ``chunks``: the stream's events, or the one body."""

    status: int
    chunks: list[dict[str, Any]]
    ended: bool = True  # a stream, with [DONE]

    @property
    def error(self) -> dict[str, Any]:
        return self.chunks[-1]["error"]

    @property
    def choices(self) -> list[Choice]:
        found: dict[int, Choice] = {}
        for chunk in self.chunks:
            for item in chunk["choices"]:
                found.setdefault(item["index"], Choice()).add(item)
        assert sorted(found) == list(range(len(found)))
        return [found[index] for index in sorted(found)]

    @property
    def only(self) -> Choice:
        (choice,) = self.choices
        return choice

    @property
    def usage(self) -> dict[str, Any]:
        (usage,) = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return usage


def ask(served: Served, kind: str, stream: bool = False, **body: Any) -> Reply:
    """Send a request of ``kind`` chat or text to its end. Greedy unless ``body`` says otherwise."""
    sent = {"model": MODEL, "temperature": 0, "max_tokens": 16, **body}
    if isinstance(sent.get("messages"), str):
        sent["messages"] = [{"role": "user", "content": sent["messages"]}]
    return send(served, kind, json.dumps(sent | ({"stream": True} if stream else {})))


def send(served: Served, kind: str, body: str | bytes, **headers: str) -> Reply:
    """Send a body as it is."""
    headers = {"content-type": "application/json", **headers}
    url = served.openai_url + ROUTES[kind]
    return read(httpx.post(url, content=body, headers=headers, timeout=120))


def read(answer: httpx.Response) -> Reply:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return Reply(answer.status_code, [answer.json()])
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    ended = lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in (lines[:-1] if ended else lines)]
    return Reply(answer.status_code, chunks, ended)
