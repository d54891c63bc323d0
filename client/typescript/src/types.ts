/** What the SDK takes and gives back. The server's own names stay as they are. */

export interface ChatMessage {
  role: string;
  content?: string | null | ReadonlyArray<Record<string, unknown>>;
  [name: string]: unknown;
}

/** Text, token ids, or chat messages. */
export type Prompt = string | readonly number[] | readonly ChatMessage[];

/** Sampling parameters by the server's names; a name that it does not know is refused by it. */
export interface Sampling {
  max_tokens?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  seed?: number;
  stop?: string | string[];
  stop_token_ids?: number[];
  min_tokens?: number;
  ignore_eos?: boolean;
  n?: number;
  response_format?: Record<string, unknown>;
  tools?: Array<Record<string, unknown>>;
  tool_choice?: string | Record<string, unknown>;
  [name: string]: unknown;
}

/** Tokens of one request. `cachedTokens` is the part of the prompt whose KV was reused. */
export interface Usage {
  promptTokens: number;
  completionTokens: number;
  cachedTokens: number;
  totalTokens: number;
}

/** A part of a call: the first of a call has its id and name. */
export interface ToolCallDelta {
  index: number;
  id: string | null;
  name: string | null;
  arguments: string;
}

/** A call that the model makes; `arguments` is JSON. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/**
 * What a choice gained in a stream. `index` tells the choices of one request apart; the last delta
 * of each has a finish reason, and the first choice's last one the usage of all.
 */
export interface Delta {
  index: number;
  text: string;
  reasoning: string;
  toolCalls: ToolCallDelta[];
  finishReason: string | null;
  usage: Usage | null;
}

/** A finished answer; with `n`, the first choice, and the further ones in `others`. */
export interface Completion {
  text: string;
  reasoning: string;
  toolCalls: ToolCall[];
  finishReason: string;
  usage: Usage;
  others: Completion[];
}

export interface ModelInfo {
  name: string;
  version: string;
  ready: boolean;
}

export interface RequestOptions {
  /** The client's model unless given. */
  model?: string;
  version?: string;
  /** Of the whole call, retries and waits included; 504 when it is over. */
  timeoutS?: number;
  /** Aborting it cancels the request, on the server too. */
  signal?: AbortSignal;
}
