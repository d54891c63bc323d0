"""What ``shoal serve`` says: its own events and the lines of its children worth showing."""

import json
import logging
import re
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
# tritonserver begins its lines with a letter and the date: I1129 13:01:16.990565
_TRITON_LINE = re.compile(r"^([IWE])\d{4} \d\d:\d\d:\d\d")
_TRITON_LEVELS = {"I": "debug", "W": "warning", "E": "error"}
_WORD_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b", re.IGNORECASE)
# Said at every start on a machine without a GPU, and harmless there.
_WITHOUT_GPU = ("CudaDriverHelper has not been initialized", "Unable to allocate pinned system")


def line_level(process: str, line: str) -> str:
    """How important a child's line is. tritonserver's own information is for debugging only."""
    if match := _TRITON_LINE.match(line):
        if any(text in line for text in _WITHOUT_GPU):
            return "debug"
        return _TRITON_LEVELS[match.group(1)]
    if line.startswith(("+-", "| ")) or not line.strip():
        return "debug"  # tritonserver's tables
    if match := _WORD_LEVEL.search(line[:80]):
        word = match.group(1).lower()
        return {"critical": "error"}.get(word, word)
    return "info"


_PROGRESS = re.compile(r" INFO loading: (?P<phase>.+?) (?P<percent>\d+)% of (?P<mib>\d+) MiB$")


@dataclass(slots=True)
class LoadingLine:
    """One line of a terminal that is drawn over and over while a model loads."""

    stream: TextIO
    phase: str = ""
    started: float = 0.0
    visible: bool = False

    def draw(self, phase: str, percent: int, mib: int) -> None:
        """Show how far a phase is and how long it will take at this rate."""
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.started = phase, now
        done = percent / 100
        left = f", {(now - self.started) * (1 - done) / done:.0f} s left" if 0 < done < 1 else ""
        bar = "#" * (percent // 5)
        text = f"{phase} [{bar:<20}] {mib * done:.0f} of {mib} MiB{left}"
        self.stream.write(f"\r\x1b[K{text}")
        self.stream.flush()
        self.visible = True

    def clear(self) -> None:
        """Make room for an ordinary line."""
        if self.visible:
            self.stream.write("\r\x1b[K")
            self.visible = False


@dataclass(slots=True)
class Console:
    """Writes to stderr, as text or as one JSON object a line."""

    level: str = "info"
    log_format: str = "text"
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    loading: LoadingLine | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.log_format == "text" and self.stream.isatty():
            self.loading = LoadingLine(self.stream)

    def event(self, text: str, level: str = "info") -> None:
        """Something the supervisor did or saw."""
        self._write("shoal", text, level)

    def child_line(self, process: str, line: str) -> None:
        """One line of a child's output; shown if it is important enough."""
        if self.loading is not None and (match := _PROGRESS.search(line)):
            self.loading.draw(match["phase"], int(match["percent"]), int(match["mib"]))
            return
        self._write(process, line, line_level(process, line))

    def _write(self, process: str, text: str, level: str) -> None:
        if LEVELS[level] < LEVELS[self.level]:
            return
        if self.log_format == "json":
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = json.dumps(
                {"time": now, "level": level, "process": process, "message": text},
                ensure_ascii=False,
            )
        else:
            text = f"[{process}] {text}" if process != "shoal" else text
        try:
            if self.loading is not None:
                self.loading.clear()
            print(text, file=self.stream, flush=True)
        except (OSError, ValueError):
            return  # nobody reads any more: serving goes on


class ConsoleHandler(logging.Handler):
    """Shows log records of our own libraries, all as debugging: the supervisor says what counts."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.event(record.getMessage(), "debug")
