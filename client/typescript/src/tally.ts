import type { Completion, Delta, ToolCall, Usage } from "./types.js";
import { NO_USAGE } from "./wire.js";

/** Sums up the deltas of one answer: its first choice, and the further ones. */
export class Tally {
  private text = "";
  private reasoning = "";
  private readonly calls = new Map<number, ToolCall>();
  private readonly others = new Map<number, Tally>();
  finishReason: string | null = null;
  usage: Usage = NO_USAGE;

  add(delta: Delta): void {
    if (delta.index !== 0) {
      const other = this.others.get(delta.index) ?? new Tally();
      this.others.set(delta.index, other);
      other.add({ ...delta, index: 0 });
      return;
    }
    this.text += delta.text;
    this.reasoning += delta.reasoning;
    this.finishReason = delta.finishReason ?? this.finishReason;
    this.usage = delta.usage ?? this.usage;
    for (const part of delta.toolCalls) {
      const call = this.calls.get(part.index) ?? { id: "", name: "", arguments: "" };
      this.calls.set(part.index, {
        id: part.id ?? call.id,
        name: part.name ?? call.name,
        arguments: call.arguments + part.arguments,
      });
    }
  }

  completion(): Completion {
    return {
      text: this.text,
      reasoning: this.reasoning,
      toolCalls: byKey(this.calls),
      finishReason: this.finishReason ?? "",
      usage: this.usage,
      others: byKey(this.others).map((other) => other.completion()),
    };
  }
}

function byKey<T>(values: Map<number, T>): T[] {
  return [...values].sort(([a], [b]) => a - b).map(([, value]) => value);
}
