"""``shoal run``: a terminal chat with a running server or, when there is none, one of its own."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shoal.backend.engine_config import ConfigError
from shoal.client.cli.managed_process import GUARD
from shoal.client.cli.settings import ServeSettings, api_key_headers
from shoal.client.event_stream import EventReader
from shoal.client.openai.tls import trusted_by

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 30.0
SHOWN_LINES = 15
HELP = "Commands: /clear forgets the conversation, /help, /exit. Ctrl-C stops an answer."


class ChatError(Exception):
    """An answer that failed; the message is the server's."""


@dataclass(slots=True)
class Conversation:
    """One chat: the turns so far, and the model that answers."""

    client: httpx.Client
    model: str
    max_tokens: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send a turn and yield the answer in pieces; one cut short is kept as far as it came."""
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for piece in self._stream():
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "messages": self.messages}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise ChatError(_error_message(reply))
                reader = EventReader()
                for piece in reply.iter_bytes():
                    for data in reader.feed(piece):
                        if data != b"[DONE]":
                            yield from _pieces(json.loads(data))
        except httpx.HTTPError as error:
            raise ChatError(f"The connection to the server failed: {error}") from error


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ChatError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _error_message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {reply.status_code}."


def run_chat(
    settings: ServeSettings,
    model: str,
    prompt: str | None,
    max_tokens: int | None,
    serve_flags: Sequence[str],
    prepare: Callable[[], object],
) -> int:
    """Chat until the user leaves, or answer ``prompt`` alone. Returns the exit status.

    ``prepare`` fetches what a server needs; it is called before one is started.
    """
    with (
        httpx.Client(
            base_url=settings.openai_url,
            trust_env=False,  # not through a proxy: it is this machine
            headers=api_key_headers(),
            verify=trusted_by(settings.tls_cert),
            timeout=httpx.Timeout(10.0, read=None),
        ) as client,
        _running_server(settings, client, serve_flags, prepare),
    ):
        _check_served(client, model)
        conversation = Conversation(client, model, max_tokens)
        if prompt is not None:
            return _answer(conversation, prompt)
        if not sys.stdin.isatty():
            return _answer(conversation, sys.stdin.read())
        _converse(conversation)
    return 0


def _converse(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())

    print(f"Chatting with {conversation.model}. {HELP}")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        if text in ("/exit", "/quit", "/bye"):
            return
        if text == "/clear":
            conversation.messages.clear()
        elif text.startswith("/"):
            print(HELP)
        elif text:
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> int:
    """Print one answer as it comes; 1 if it failed."""
    try:
        with contextlib.closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
    except ChatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n(stopped)")
        return 130
    print()
    return 0


@contextlib.contextmanager
def _running_server(
    settings: ServeSettings,
    client: httpx.Client,
    serve_flags: Sequence[str],
    prepare: Callable[[], object],
) -> Iterator[None]:
    """A ready server: the one that runs, else one of our own that ends with the chat."""
    if _get_ok(client, "/health/live"):
        _wait_ready(client, READY_TIMEOUT_S, None)
        yield
        return
    prepare()  # with its progress shown, which the server's would not be
    log = settings.resolved_run_dir.with_suffix(".serve.log")
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    print(f"No server is running: starting one (log: {log})", file=sys.stderr)
    # The guard ends the server with us, however we end, and shields it from the terminal's Ctrl-C.
    command = [
        *(sys.executable, "-I", "-S", str(GUARD)),
        *(sys.executable, "-m", "shoal.client.cli.app", "serve", *serve_flags),
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        _wait_ready(client, START_TIMEOUT_S, process, log)
        yield
    finally:
        _stop(process)


def _wait_ready(
    client: httpx.Client,
    timeout_s: float,
    process: "subprocess.Popen[bytes] | None",
    log: Path | None = None,
) -> None:
    deadline = time.monotonic() + timeout_s
    while not _get_ok(client, "/health/ready"):
        if process is not None and process.poll() is not None:
            lines = log.read_text("utf-8", "replace").splitlines() if log else []
            raise ConfigError("The server did not start.\n" + "\n".join(lines[-SHOWN_LINES:]))
        if time.monotonic() > deadline:
            raise ConfigError(f"The server was not ready within {timeout_s:g} s.")
        time.sleep(0.2)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
        return
    assert process.stdin is not None
    process.stdin.close()  # the guard's sign to kill all
    process.wait()


def _get_ok(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def _check_served(client: httpx.Client, model: str) -> None:
    try:
        reply = client.get("/v1/models")
        needs_key = reply.status_code == 401
        names = [] if needs_key else [str(entry["id"]) for entry in reply.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("What listens on the OpenAI port is not Shoal.") from error
    if needs_key:
        raise ConfigError("The server wants an API key: set SHOAL_API_KEY to a valid one.")
    if model not in names:
        raise ConfigError(
            f"The running server does not serve {model!r}. It serves: {', '.join(names) or 'none'}."
        )
