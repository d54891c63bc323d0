"""Server-sent events out of bytes that arrive in any pieces."""


class EventReader:
    """Splits a stream into the data of its events.

    Lines end where the format says, at LF, CR or both: JSON holds other line ends, such as U+2028,
    as ordinary characters.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of a line that is not yet whole
        self._data: list[bytes] = []  # of an event that is not yet whole
        self._skip_newline = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Take some bytes; returns the data of every event that they complete."""
        if self._skip_newline and piece:
            piece = piece.removeprefix(b"\n")
            self._skip_newline = False
        if piece.endswith(b"\r"):
            self._skip_newline = True  # the CR of a CR LF whose LF comes next
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = piece.split(b"\n")
        self._pieces.append(first)
        events = []
        for line in others:
            events += self._end_line(b"".join(self._pieces))
            self._pieces = [line]
        return events

    def _end_line(self, line: bytes) -> list[bytes]:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return []
        if not self._data:
            return []
        event = b"\n".join(self._data)
        self._data = []
        return [event]
