"""The committed request traces as requests. ``traces/README.md`` says what they are and whose."""

import csv
import gzip
import itertools
from datetime import datetime
from pathlib import Path

import msgspec

from shoal.load.workload import Request, Segment

TRACES_FOLDER = Path(__file__).parent / "traces"
AZURE_FILE = TRACES_FOLDER / "azure-2023-conv.csv.gz"
MOONCAKE_FILE = TRACES_FOLDER / "mooncake-conversation.jsonl.gz"
MOONCAKE_BLOCK = 512  # tokens per hash id


class _MooncakeLine(msgspec.Struct):
    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def azure_conversations(divisor: float, limit: int | None = None) -> list[Request]:
    """Each prompt is a text of its own: the trace does not say what was shared."""
    requests = []
    with gzip.open(AZURE_FILE, "rt", encoding="ascii", newline="") as lines:
        rows = csv.reader(lines)
        next(rows)
        start: datetime | None = None
        for number, (timestamp, prompt, output) in enumerate(itertools.islice(rows, limit)):
            time = datetime.fromisoformat(timestamp[:26])  # seven digits of a second there
            start = start or time
            requests.append(
                Request(
                    (time - start).total_seconds(),
                    (Segment(f"azure:{number}", scaled(int(prompt), divisor)),),
                    Segment(f"azure-answer:{number}", scaled(int(output), divisor)),
                )
            )
    return requests


def mooncake_conversations(divisor: float, limit: int | None = None) -> list[Request]:
    """Each hash id becomes the tokens of one block, so equal prefixes are equal tokens.

    A block of 512 tokens becomes one of ``512 / divisor``; the last one of a prompt is cut to the
    prompt's length.
    """
    block = scaled(MOONCAKE_BLOCK, divisor)
    decoder = msgspec.json.Decoder(_MooncakeLine)
    requests = []
    with gzip.open(MOONCAKE_FILE, "rb") as lines:
        for number, line in enumerate(itertools.islice(lines, limit)):
            logged = decoder.decode(line)
            num_left = scaled(logged.input_length, divisor)
            prompt = []
            for hash_id in logged.hash_ids:
                num_tokens = min(block, num_left)
                if num_tokens > 0:
                    prompt.append(Segment(f"mooncake:{hash_id}", num_tokens))
                num_left -= num_tokens
            requests.append(
                Request(
                    logged.timestamp / 1000,
                    tuple(prompt),
                    Segment(f"mooncake-answer:{number}", scaled(logged.output_length, divisor)),
                )
            )
    return requests


def scaled(length: int, divisor: float) -> int:
    """A length divided and rounded, at least 1."""
    return max(1, round(length / divisor))
