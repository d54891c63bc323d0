export { Client, DeltaStream, type ClientOptions } from "./client.js";
export { ShoalError } from "./errors.js";
export { RetryPolicy, type RetryFields } from "./retries.js";
export type {
  ChatMessage,
  Completion,
  Delta,
  ModelInfo,
  Prompt,
  RequestOptions,
  Sampling,
  ToolCall,
  ToolCallDelta,
  Usage,
} from "./types.js";
