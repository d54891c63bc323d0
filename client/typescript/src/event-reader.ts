/**
 * Splits a text that arrives in any pieces into the data of its server-sent events. Lines end where
 * the format says, at LF, CR or both; other line ends, such as U+2028, are text.
 */
export class EventReader {
  private rest: string[] = []; // of a line that is not yet whole
  private data: string[] = []; // of an event that is not yet whole
  private skipNewline = false;

  feed(piece: string): string[] {
    if (piece === "") return [];
    if (this.skipNewline && piece.startsWith("\n")) piece = piece.slice(1);
    this.skipNewline = piece.endsWith("\r"); // of a CR LF whose LF comes next
    const lines = piece.split(/\r\n|\r|\n/);
    const events: string[] = [];
    for (let i = 0; i < lines.length - 1; i++) {
      this.rest.push(lines[i]!);
      this.endLine(this.rest.join(""), events);
      this.rest = [];
    }
    this.rest.push(lines[lines.length - 1]!);
    return events;
  }

  private endLine(line: string, events: string[]): void {
    if (line !== "") {
      const colon = line.indexOf(":");
      if (colon < 0 || line.slice(0, colon) !== "data") return;
      const value = line.slice(colon + 1);
      this.data.push(value.startsWith(" ") ? value.slice(1) : value);
    } else if (this.data.length > 0) {
      events.push(this.data.join("\n"));
      this.data = [];
    }
  }
}
