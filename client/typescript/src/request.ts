import { ShoalError, errorOf, timedOut, unavailable } from "./errors.js";
import { EventReader } from "./event-reader.js";
import type { Delta } from "./types.js";
import { ChunkReader, wholeDeltas, type WireBody } from "./wire.js";

export type Fetch = typeof globalThis.fetch;

/** The life of one call: ends by the caller's signal, its timeout, or `abort`. */
export class Deadline {
  private readonly controller = new AbortController();
  private readonly timer: ReturnType<typeof setTimeout> | undefined;
  readonly at: number | null;

  constructor(
    timeoutS: number | undefined,
    private readonly outer: AbortSignal | undefined,
  ) {
    this.at = timeoutS === undefined ? null : Date.now() + timeoutS * 1000;
    if (timeoutS !== undefined) {
      this.timer = setTimeout(() => this.controller.abort(timedOut()), timeoutS * 1000);
    }
    if (outer?.aborted) this.onOuter();
    else outer?.addEventListener("abort", this.onOuter, { once: true });
  }

  get signal(): AbortSignal {
    return this.controller.signal;
  }

  /** Cancel what still runs. */
  abort(): void {
    this.controller.abort();
    this.release();
  }

  /** Nothing runs any more. */
  release(): void {
    clearTimeout(this.timer);
    this.outer?.removeEventListener("abort", this.onOuter);
  }

  private readonly onOuter = (): void => {
    this.controller.abort(this.outer?.reason);
  };
}

/** Send a request; rejects with a ShoalError, or with the signal's reason when it is aborted. */
export async function send(
  fetch: Fetch,
  url: string,
  init: RequestInit,
  signal: AbortSignal,
): Promise<Response> {
  return guarded(signal, async () => {
    const reply = await fetch(url, { ...init, signal, redirect: "error" });
    if (!reply.ok) throw await errorOf(reply);
    return reply;
  });
}

export async function readWhole(reply: Response, signal: AbortSignal): Promise<Delta[]> {
  return guarded(signal, async () => wholeDeltas((await reply.json()) as WireBody));
}

/** The deltas of a streamed answer; ends at [DONE], and throws at any other end. */
export async function* readEvents(reply: Response, signal: AbortSignal): AsyncGenerator<Delta> {
  const reader = reply.body?.getReader();
  if (!reader) throw unavailable("The server sent no answer.");
  const decoder = new TextDecoder();
  const events = new EventReader();
  const chunks = new ChunkReader();
  try {
    for (;;) {
      const { done, value } = await guarded(signal, () => reader.read());
      if (done) throw unavailable("The server ended the answer before it was finished.");
      for (const data of events.feed(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield* await guarded(signal, async () => chunks.read(JSON.parse(data) as WireBody));
      }
    }
  } finally {
    // Closes the connection of an answer that has not ended, by which the server ends its work.
    await reader.cancel().catch(() => undefined);
  }
}

/** Every failure as a ShoalError; an abort as its reason. */
export async function guarded<T>(signal: AbortSignal, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (signal.aborted) throw signal.reason;
    if (error instanceof ShoalError) throw error;
    if (error instanceof SyntaxError || (error instanceof TypeError && !isNetworkError(error))) {
      const text = "The server answered in another form than the OpenAI API's.";
      throw new ShoalError(text, { status: 502, code: "bad_gateway", cause: error });
    }
    throw unavailable("The server cannot be reached.", error);
  }
}

/** fetch rejects with a TypeError: in Node it has a cause, in browsers one of these texts. */
function isNetworkError(error: TypeError): boolean {
  const texts = /fetch|network|load failed|terminated|socket/i;
  return error.cause !== undefined || texts.test(error.message);
}
