"""Progress of downloads and loading: bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO


class ByteProgress(Protocol):
    """Receives how many bytes are done so far."""

    def update(self, done: int, total: int | None = None) -> None:
        """``total`` replaces the one given at the start, for phases that learn it late."""


class Reporter:
    """Tells a person what is going on, on stderr. ``quiet`` keeps only messages."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.quiet = quiet
        self.is_terminal = self.stream.isatty()

    def message(self, text: str) -> None:
        """Print one line."""
        print(text, file=self.stream, flush=True)

    @contextmanager
    def transfer(self, label: str, total: int) -> Iterator[ByteProgress]:
        """Show one transfer of ``total`` bytes (0: not known yet) until the block ends."""
        if self.quiet:
            yield _Silent()
        elif self.is_terminal:
            with _rich_bar(self.stream, label, total) as bar:
                yield bar
        else:
            lines = PlainProgress(self, label, total)
            yield lines
            lines.finish()


class _Silent:
    def update(self, done: int, total: int | None = None) -> None:
        pass


class PlainProgress:
    """One line at the start, one each ``interval_s`` while it lasts, one at the end."""

    def __init__(self, reporter: Reporter, label: str, total: int, interval_s: float = 5.0) -> None:
        self.reporter, self.label, self.total = reporter, label, total
        self.interval_s = interval_s
        self.done = 0
        self.started = self.last_line = time.monotonic()
        reporter.message(f"{label}: {mebibytes(total)}" if total else f"{label} ...")

    def update(self, done: int, total: int | None = None) -> None:
        self.done = done
        if total is not None:
            self.total = total
        now = time.monotonic()
        if now - self.last_line >= self.interval_s:
            self.last_line = now
            self.reporter.message(f"{self.label}: {self.describe(now - self.started)}")

    def describe(self, elapsed_s: float) -> str:
        """Bytes done of all, and the time left at the mean rate so far."""
        if not self.total:
            return f"{elapsed_s:.0f} s"
        text = f"{mebibytes(self.done)} of {mebibytes(self.total)}"
        if self.done and elapsed_s > 0:
            left_s = (self.total - self.done) * elapsed_s / self.done
            text += f", {left_s:.0f} s left"
        return text

    def finish(self) -> None:
        elapsed_s = time.monotonic() - self.started
        self.reporter.message(f"{self.label}: done in {elapsed_s:.1f} s")


def mebibytes(num_bytes: int) -> str:
    """``55369373`` -> ``52.8 MiB``."""
    return f"{num_bytes / 2**20:.1f} MiB"


@contextmanager
def _rich_bar(stream: TextIO, label: str, total: int) -> Iterator[ByteProgress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
    with bar:
        task = bar.add_task(label, total=total or None)

        class Bar:
            def update(self, done: int, total: int | None = None) -> None:
                bar.update(task, completed=done, total=total)

        yield Bar()
