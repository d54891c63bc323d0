"""Comparing servers: reading answers, prompts, the journal, ratios, rooflines, the page."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.load.compare.client import (
    Client,
    ClosedLoop,
    Exchange,
    Repeats,
    measure_closed_loop,
    measure_repeats,
    summarize,
)
from shoal.load.compare.contenders import (
    Contender,
    Launch,
    MissingError,
    contenders,
    launch,
    version,
)
from shoal.load.compare.event_stream import StreamError, read_answer
from shoal.load.compare.limits import Limits
from shoal.load.compare.prompts import RandomWords, common_words
from shoal.load.compare.records import (
    REPEAT,
    Case,
    Journal,
    Machine,
    MachineLimits,
    Measured,
    Record,
    Repeated,
    Skipped,
)
from shoal.load.compare.report import ratio_rows, write_report
from shoal.load.compare.roofline import ModelShape, Peaks, Run, best_tokens_per_s
from shoal.load.compare.rounds import Comparison, cases_for
from shoal.load.compare.servers import ServerError, environment, running
from shoal.load.compare.summary import Spread, peaks, ratio, repeats, rows

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def text_event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def usage_event(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


EVENTS = (
    text_event("a"),
    text_event(""),
    text_event("b c"),
    usage_event(5, 3),
    b"data: [DONE]\n\n",
)


def chunked(pieces: tuple[bytes, ...]) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


PLAIN = HEAD + b"\r\n" + b"".join(EVENTS)
ANSWERS = {"plain": PLAIN, "chunked": chunked(EVENTS), "crlf": PLAIN.replace(b"\n\n", b"\r\n\r\n")}


class TestReadAnswer:
    @pytest.mark.parametrize("name", ANSWERS)
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
    def test_however_it_is_cut(self, name: str, size: int) -> None:
        data = ANSWERS[name]
        pieces = [(float(i), data[i : i + size]) for i in range(0, len(data), size)]
        answer = read_answer(pieces)
        assert answer.text == "ab c"
        assert (answer.prompt_tokens, answer.completion_tokens) == (5, 3)
        assert len(answer.text_times) == 2

    def test_an_event_has_the_time_of_its_last_byte(self) -> None:
        head, body = HEAD + b"\r\n", EVENTS[0] + EVENTS[2]
        cut = len(EVENTS[0]) - 4
        rest = usage_event(5, 3)
        pieces = [(1.0, head), (2.0, body[:cut]), (3.0, body[cut:]), (4.0, rest)]
        assert read_answer(pieces).text_times == (3.0, 3.0)

    def test_an_error_status_is_told_with_its_body(self) -> None:
        data = b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull"
        with pytest.raises(StreamError, match="HTTP 429: full"):
            read_answer([(0.0, data)])

    @pytest.mark.parametrize(
        ("events", "message"),
        [
            ((b'data: {"error": {"message": "no"}}\n\n',), "the server reported"),
            ((b"data: {broken\n\n",), "not as expected"),
            ((text_event("a"),), "without usage"),
            ((usage_event(5, 3),), "without text"),
        ],
    )
    def test_what_is_no_answer_is_refused(self, events: tuple[bytes, ...], message: str) -> None:
        with pytest.raises(StreamError, match=message):
            read_answer([(0.0, HEAD + b"\r\n" + b"".join(events))])

    def test_what_is_not_http_is_refused(self) -> None:
        with pytest.raises(StreamError, match="not an HTTP response"):
            read_answer([(0.0, b"hello\r\n\r\n")])


class TestSummarize:
    def test_figures_of_two_answers(self) -> None:
        def exchange(start: float, times: tuple[float, ...]) -> Exchange:
            pieces = [(start, HEAD + b"\r\n"), *((start + t, text_event("x")) for t in times)]
            pieces.append((start + times[-1], usage_event(5, 4)))
            return Exchange(start, pieces, start + times[-1])

        loop = summarize(
            [exchange(10.0, (0.1, 0.2, 0.4)), exchange(10.5, (0.3, 0.5, 0.9))], 2, 2.0, 0.5
        )
        assert (loop.requests, loop.streams, loop.tokens_per_s) == (2, 2, 4.0)
        assert (loop.ttft_p50, loop.ttft_p95) == (200.0, 290.0)
        assert (loop.tpot_p50, loop.tpot_p95) == (150.0, 195.0)  # of 100 and 200 ms
        assert (loop.gap_p50, loop.gap_max) == (200.0, 400.0)
        assert (loop.events_per_answer, loop.completion_tokens) == (3.0, [4])


def word_checkpoint(folder: Path) -> Path:
    """A tokenizer with one token for each of these words; a space is a part of the next word."""
    words = ["\u2581" + word for word in ("stone", "river", "light", "paper", "window")]
    vocab = {token: idx for idx, token in enumerate(["<unk>", "\u2581", "\u2581The", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class TestRandomWords:
    def test_exact_lengths_and_distinct_texts(self, tmp_path: Path) -> None:
        checkpoint = word_checkpoint(tmp_path)
        words = RandomWords(checkpoint, seed=1)
        texts = [words.text(12) for _ in range(8)]
        assert {len(text.split()) for text in texts} == {12}
        assert len(set(texts)) == 8
        assert texts == [RandomWords(checkpoint, 1).text(12)] + texts[1:]
        assert len(words.token_ids(20)) == 20

    def test_only_short_lower_case_words_count(self) -> None:
        vocab = {"\u0120cat": 0, "dog": 1, "\u0120Cat": 2, "\u0120ab": 3, "\u0120c4t": 4}
        assert common_words(vocab) == ["cat"]


class FakeServer:
    """Answers every completion alike, in pieces, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.open = 0
        self.most_open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        writer.write(HEAD + b"\r\n")
        for event in EVENTS[:-1]:
            writer.write(event)
            await asyncio.sleep(0.001)
        self.open -= 1  # before the end: the client asks again as soon as it sees that
        writer.write(EVENTS[-1])
        writer.close()


class TestClient:
    async def test_a_closed_loop(self, tmp_path: Path) -> None:
        fake = FakeServer()
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        words = RandomWords(word_checkpoint(tmp_path), 0)
        async with server:
            loop = await measure_closed_loop(Client(port, "m"), words, 2, 6, (9, 7))
        assert (loop.requests, loop.streams, loop.completion_tokens) == (6, 2, [3])
        assert fake.most_open == 2
        warm_up, measured = fake.bodies[:2], fake.bodies[2:]
        assert [body["max_tokens"] for body in warm_up] == [16, 16]
        assert len({body["prompt"] for body in fake.bodies}) == 8
        assert all(
            body["max_tokens"] == body["min_tokens"] == 7
            and body["ignore_eos"] is body["stream"] is True
            and body["temperature"] == 0
            for body in measured
        )

    async def test_prompts_sent_twice(self, tmp_path: Path) -> None:
        fake = FakeServer()
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        words = RandomWords(word_checkpoint(tmp_path), 0)
        async with server:
            result = await measure_repeats(Client(port, "m"), words, 2, (9, 4))
        prompts = [body["prompt"] for body in fake.bodies[1:]]
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
        assert len(result.first_ttft) == len(result.repeat_ttft) == 2

    async def test_a_failed_answer_fails_the_measurement(self, tmp_path: Path) -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 503 Busy\r\n\r\nbusy")
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        words = RandomWords(word_checkpoint(tmp_path), 0)
        async with server:
            with pytest.raises(StreamError, match="HTTP 503"):
                await measure_closed_loop(Client(port, "m"), words, 1, 1, (9, 4))


def loop_of(
    streams: int, tokens_per_s: float, ttft: float = 100.0, tpot: float = 10.0
) -> ClosedLoop:
    return ClosedLoop(
        streams, 2 * streams, [128], [128], 1.0, tokens_per_s, ttft, ttft, tpot, 2 * tpot, 1.0, 2.0,
        128.0, 0.1,
    )  # fmt: skip


def measured(round_number: int, name: str, loop: ClosedLoop, bits: str = "bf16") -> Measured:
    return Measured(round_number, name, "smollm2", bits, loop, 1.0, 0.5)


RECORDS: list[Record] = [
    Machine("2026-01-02", "a CPU", 2, {"llama.cpp": "1.2"}),
    *(MachineLimits(n, Limits(30.0 + n, 400.0, 800.0), 0.1) for n in (1, 2, 3)),
    *(measured(n, "shoal", loop_of(8, 200.0 + 10 * n, ttft=90.0)) for n in (1, 2, 3)),
    *(measured(n, "llama.cpp", loop_of(8, 100.0 + n, ttft=80.0)) for n in (1, 2, 3)),
    *(measured(n, "openvino", loop_of(8, 110.0, ttft=300.0)) for n in (1, 2, 3)),
    measured(1, "shoal", loop_of(1, 60.0), bits="int8"),
    Repeated(1, "shoal", "smollm2", "bf16", Repeats([512], [200.0, 210.0, 100.0], [9.0, 8.0], [])),
    Skipped(1, "vllm", "smollm2", "bf16", "it did not become ready\nfirst line\nlast line"),
    Skipped(1, "llama.cpp", "smollm2", "bf16", "at first"),
]


class TestSummary:
    def test_medians_and_ranges(self) -> None:
        table = rows(RECORDS, "smollm2", "bf16")
        assert [(row.name, row.rounds) for row in table] == [
            ("shoal", 3), ("llama.cpp", 3), ("openvino", 3),
        ]  # fmt: skip
        assert table[0].metrics["tokens_per_s"] == Spread(220.0, 210.0, 230.0)

    def test_the_best_peer_is_chosen_for_each_figure(self) -> None:
        table = rows(RECORDS, "smollm2", "bf16")
        throughput, ttft = ratio(table, 8, "tokens_per_s"), ratio(table, 8, "ttft_p50")
        assert throughput is not None
        assert ttft is not None
        assert (throughput.best_name, throughput.value) == ("openvino", 2.0)
        assert (ttft.best_name, ttft.value) == ("llama.cpp", 90 / 80)

    def test_no_ratio_without_us_or_without_peers(self) -> None:
        assert ratio(rows(RECORDS, "smollm2", "int8"), 1, "tokens_per_s") is None
        others = [r for r in RECORDS if not (isinstance(r, Measured) and r.name == "shoal")]
        assert ratio(rows(others, "smollm2", "bf16"), 8, "tokens_per_s") is None
        assert ratio_rows(RECORDS, "smollm2")[1] == ("int8", "1", "", "", "", "")

    def test_repeats_are_medians_of_their_round(self) -> None:
        first, second = repeats(RECORDS, "smollm2", "bf16")["shoal"]
        assert (first.median, second.median) == (200.0, 8.5)

    def test_int4_is_held_against_int8_products(self) -> None:
        limits = Limits(30.0, 400.0, 800.0)
        assert peaks(limits, "bf16") == Peaks(30e9, 400e9)
        assert peaks(limits, "int4") == peaks(limits, "int8") == Peaks(30e9, 800e9)


CONFIG = {
    "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
    "intermediate_size": 6, "vocab_size": 10, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


class TestRoofline:
    @pytest.fixture
    def shape(self, tmp_path: Path) -> ModelShape:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        return ModelShape.of_checkpoint(tmp_path)

    def test_the_shape_of_a_checkpoint(self, shape: ModelShape) -> None:
        # q and o 4 x 4, k and v 4 x 2, three products of 4 x 6
        assert shape.layer_weights == 3 * (16 + 16 + 8 + 8 + 72)
        assert shape.output_weights == 40
        assert shape.windows == (5, None, 5)

    def test_a_step_bound_by_memory(self, shape: ModelShape) -> None:
        free_products = Peaks(1.0, 1e12)
        weights, entry = 360 + 40, 2 * 1 * 2 * 2
        keys = 5 + 9 + 5  # of 9 computed tokens, in windows of 5
        run = [Run(1, 9)]
        assert shape.step_seconds(run, "bf16", free_products) == 2 * weights + entry * (keys + 3)
        assert shape.step_seconds(run, "int4", free_products) == weights / 2 + entry * (keys + 3)

    def test_a_step_bound_by_products(self, shape: ModelShape) -> None:
        free_memory = Peaks(1e12, 1.0)
        pairs = 3 * (1 + 2)  # two tokens with nothing before them, in three layers
        expected = 2 * (360 * 2 + 40) + 4 * 2 * 2 * pairs
        assert shape.step_seconds([Run(2, 0)], "bf16", free_memory) == expected
        unsampled = shape.step_seconds([Run(2, 0, samples=False)], "bf16", free_memory)
        assert unsampled == expected - 2 * 40

    def test_the_best_order_of_a_closed_loop(self, shape: ModelShape) -> None:
        limits = Peaks(1e3, 1e4)
        seconds = shape.step_seconds([Run(6, 0)] * 2, "bf16", limits)
        seconds += shape.step_seconds([Run(1, 6)] * 2, "bf16", limits)
        assert best_tokens_per_s(shape, "bf16", limits, 2, (6, 2)) == pytest.approx(4 / seconds)


class TestJournal:
    def test_a_stopped_run_goes_on(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "results.jsonl"
        cases = cases_for([1, 8], None, repeat=True)
        ours = Contender("shoal", "smollm2", "bf16")
        journal = Journal(path)
        assert journal.pending(1, ours, cases) == cases
        for record in RECORDS:
            journal.append(record)
        with path.open("ab") as file:
            file.write(b'{"type":"measured","rou')  # cut short
        again = Journal(path)
        assert again.records == RECORDS
        assert [case.streams for case in again.pending(1, ours, cases)] == [1]
        assert [case.streams for case in again.pending(2, ours, cases)] == [1, REPEAT]
        assert again.has_limits(3)
        assert not again.has_limits(4)
        skipped = Contender("vllm", "smollm2", "bf16")
        assert again.pending(1, skipped, cases) == cases

    def test_cases(self) -> None:
        assert cases_for([1, 8], None, repeat=False) == [Case(1, 4), Case(8, 16)]
        assert cases_for([8], [20], repeat=False) == [Case(8, 20)]
        with pytest.raises(ValueError, match="one positive number"):
            cases_for([1, 8], [4], repeat=False)
        with pytest.raises(ValueError, match="one positive number"):
            cases_for([0], None, repeat=False)


class TestContenders:
    def test_turns(self) -> None:
        found = [(c.bits, c.name) for c in contenders("m", ("bf16", "int8"), ("vllm",))]
        assert found == [
            ("bf16", "shoal"), ("bf16", "vllm"), ("int8", "shoal"), ("int8", "vllm"),
        ]  # fmt: skip

    @pytest.mark.parametrize("name", ["shoal", "llama.cpp", "vllm", "openvino"])
    def test_what_is_not_there_is_named(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(MissingError, match=f"is not in .*{tmp_path.name}"):
            launch(Contender(name, "smollm2", "int8"), tmp_path, 1, tmp_path / "work")

    def test_versions_come_of_folders(self, tmp_path: Path) -> None:
        (tmp_path / "venv-ov/lib/python3.11/site-packages/openvino_genai-9.8.dist-info").mkdir(
            parents=True
        )
        assert version("openvino", tmp_path) == "9.8"
        assert version("llama.cpp", tmp_path) == ""
        assert version("shoal", tmp_path) == ""

    def test_missing_ones_are_skipped_and_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = Limits(30.0, 400.0, 800.0)
        monkeypatch.setattr("shoal.load.compare.rounds.measure_limits", lambda: limits)
        journal = Journal(None)
        cases = cases_for([1], None, repeat=False)
        Comparison(journal, tmp_path, 1).run("smollm2", ("bf16",), ("vllm",), cases, 2)
        skipped = [record for record in journal.records if isinstance(record, Skipped)]
        assert [(r.round, r.name) for r in skipped] == [
            (1, "shoal"), (1, "vllm"), (2, "shoal"), (2, "vllm"),
        ]  # fmt: skip
        page = tmp_path / "page.md"
        write_report(journal.records, tmp_path, page)
        assert "- vllm, SmolLM2-135M-Instruct, bf16: vllm is not in" in page.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TestServers:
    def test_one_that_ends_at_once_is_an_error_with_its_last_words(self, tmp_path: Path) -> None:
        start = Launch(("sh", "-c", "echo no such model; exit 3"), "/health")
        with (
            pytest.raises(ServerError, match="no such model"),
            running(start, free_port(), tmp_path / "log"),
        ):
            pass

    def test_a_taken_port_is_told_before_anything_starts(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ServerError, match=f"port {port} is taken"):
                running(Launch(("false",), "/"), port, tmp_path / "log").__enter__()
        assert not (tmp_path / "log").exists()

    def test_ended_from_outside_it_ends_the_server_at_once(self, tmp_path: Path) -> None:
        port = free_port()
        script = (
            "import http.server as h, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "h.SimpleHTTPRequestHandler.log_message = lambda *_: None;"
            f"h.HTTPServer(('127.0.0.1', {port}), h.SimpleHTTPRequestHandler).serve_forever()"
        )
        start = Launch((sys.executable, "-c", script), "/")
        with pytest.raises(SystemExit), running(start, port, tmp_path / "log") as pid:
            sys.exit("from a signal")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_what_a_shell_set_does_not_reach_a_server(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("PYTHONPATH", "OMP_NUM_THREADS", "SHOAL_OPENAI_PORT", "KEPT"):
            monkeypatch.setenv(name, "x")
        kept = environment()
        assert kept["KEPT"] == "x"
        assert not kept.keys() & {"PYTHONPATH", "OMP_NUM_THREADS", "SHOAL_OPENAI_PORT"}


class TestReport:
    def test_the_page_holds_figures_ratios_and_reasons(self, tmp_path: Path) -> None:
        peers = tmp_path / "peers"
        (peers / "smollm2-bf16").mkdir(parents=True)
        (peers / "smollm2-bf16" / "config.json").write_text(json.dumps(CONFIG))
        page = tmp_path / "reports" / "cpu.md"
        write_report(RECORDS, peers, page)
        text = page.read_text()
        assert "a CPU, 2 cores" in text
        assert "llama.cpp 1.2" in text
        assert "| memory read, GB/s | 32.0 | 31.0–33.0 |" in text
        assert "| 8 | shoal | 220 (210–230) | 90.0 (90.0–90.0) |" in text
        assert "| bf16 | 8 | 2.00 (openvino) | 1.12 (llama.cpp) |" in text
        assert "| shoal | 200 (200–200) | 8.5 (8.5–8.5) |" in text
        assert "- vllm, SmolLM2-135M-Instruct, bf16: it did not become ready (last line)" in text
        assert "at first" not in text  # it was measured later
        assert "% of " in text
        assert (page.parent / "cpu-smollm2.png").stat().st_size > 1000

    def test_without_a_checkpoint_there_is_no_roofline(self, tmp_path: Path) -> None:
        write_report(RECORDS, tmp_path, tmp_path / "cpu.md")
        assert "% of " not in (tmp_path / "cpu.md").read_text()
