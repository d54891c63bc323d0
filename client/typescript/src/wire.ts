/** From the OpenAI API's bodies and chunks to ours. */

import { errorFrom } from "./errors.js";
import type { Delta, ToolCallDelta, Usage } from "./types.js";

interface WireCall {
  index?: number;
  id?: string | null;
  function?: { name?: string | null; arguments?: string | null };
}

interface WirePart {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: WireCall[] | null;
}

interface WireChoice {
  index: number;
  text?: string | null;
  delta?: WirePart;
  message?: WirePart;
  finish_reason?: string | null;
}

interface WireUsage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number | null } | null;
}

export interface WireBody {
  error?: unknown;
  choices: WireChoice[];
  usage?: WireUsage | null;
}

export const NO_USAGE: Usage = {
  promptTokens: 0,
  completionTokens: 0,
  cachedTokens: 0,
  totalTokens: 0,
};

/** A whole answer, one delta a choice. */
export function wholeDeltas(body: WireBody): Delta[] {
  if (body.usage == null) throw new TypeError("no usage");
  const usage = readUsage(body.usage);
  return body.choices.map((choice) => {
    const delta = readChoice(choice, choice.message ?? {});
    return delta.index === 0 ? { ...delta, usage } : delta;
  });
}

/**
 * Turns chunks into deltas. The end of the first choice is held back until the usage comes, so that
 * its last delta tells both.
 */
export class ChunkReader {
  private end: Delta | null = null;

  read(chunk: WireBody): Delta[] {
    if (chunk.error) throw errorFrom(chunk.error);
    const deltas: Delta[] = [];
    for (const choice of chunk.choices) {
      const delta = readChoice(choice, choice.delta ?? {});
      if (delta.finishReason !== null && delta.index === 0) this.end = delta;
      else if (!isEmpty(delta)) deltas.push(delta);
    }
    if (chunk.usage && this.end) deltas.push({ ...this.end, usage: readUsage(chunk.usage) });
    return deltas;
  }
}

function readChoice(choice: WireChoice, part: WirePart): Delta {
  if (typeof choice.index !== "number") throw new TypeError("no index");
  return {
    index: choice.index,
    text: choice.text || part.content || "",
    reasoning: part.reasoning_content || "",
    toolCalls: (part.tool_calls ?? []).map(readCall),
    finishReason: choice.finish_reason ?? null,
    usage: null,
  };
}

function readCall(call: WireCall, position: number): ToolCallDelta {
  return {
    index: call.index ?? position,
    id: call.id ?? null,
    name: call.function?.name ?? null,
    arguments: call.function?.arguments ?? "",
  };
}

function readUsage(usage: WireUsage): Usage {
  if (typeof usage.prompt_tokens !== "number") throw new TypeError("no usage");
  return {
    promptTokens: usage.prompt_tokens,
    completionTokens: usage.completion_tokens,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    totalTokens: usage.prompt_tokens + usage.completion_tokens,
  };
}

function isEmpty(delta: Delta): boolean {
  const isSilent = delta.text === "" && delta.reasoning === "" && delta.toolCalls.length === 0;
  return isSilent && delta.finishReason === null;
}
