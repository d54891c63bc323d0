"""What is measured, one JSON line each as it comes, so that a run can stop and go on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.load.compare.client import ClosedLoop, Repeats
from shoal.load.compare.contenders import Contender
from shoal.load.compare.limits import Limits

REPEAT = 0  # in place of a number of streams


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement of one server. ``streams`` 0: prompts sent twice, one at a time."""

    streams: int
    requests: int
    num_prompt: int = 128
    num_outputs: int = 128


class Machine(msgspec.Struct, frozen=True, tag="machine"):
    """Where and when a run began."""

    date: str
    cpu: str
    cores: int
    versions: dict[str, str]


class MachineLimits(msgspec.Struct, frozen=True, tag="limits"):
    """At the start of a round."""

    round: int
    limits: Limits
    load_average: float


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """One case of one contender in one round."""

    round: int
    name: str
    model: str
    bits: str
    result: ClosedLoop
    start_s: float  # of the server, until it was ready
    load_average: float  # before the server started


class Repeated(msgspec.Struct, frozen=True, tag="repeated"):
    """The repeat-prompt case of one contender in one round."""

    round: int
    name: str
    model: str
    bits: str
    result: Repeats


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A contender that is not here or does not start or answer."""

    round: int
    name: str
    model: str
    bits: str
    reason: str


Record = Machine | MachineLimits | Measured | Repeated | Skipped


class Journal:
    """The records of one comparison, and their file if they have one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self.records: list[Record] = read_records(path) if path and path.exists() else []

    def append(self, record: Record) -> None:
        """Write it down at once."""
        self.records.append(record)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(self._encoder.encode(record) + b"\n")

    def has_limits(self, round_number: int) -> bool:
        return any(isinstance(r, MachineLimits) and r.round == round_number for r in self.records)

    def pending(self, round_number: int, contender: Contender, cases: Sequence[Case]) -> list[Case]:
        """The cases that have no result yet. What failed counts as never tried."""
        wanted = (round_number, contender.name, contender.model, contender.bits)
        done = {
            record.result.streams if isinstance(record, Measured) else REPEAT
            for record in self.records
            if isinstance(record, Measured | Repeated)
            and (record.round, record.name, record.model, record.bits) == wanted
        }
        return [case for case in cases if case.streams not in done]


def read_records(path: Path) -> list[Record]:
    """Decode a journal; a last line that was cut short is left out."""
    decoder = msgspec.json.Decoder(Record)
    lines = path.read_bytes().split(b"\n")
    return [decoder.decode(line) for line in lines[:-1] if line]
