import { ShoalError, unavailable } from "./errors.js";
import { Deadline, guarded, readEvents, readWhole, send, type Fetch } from "./request.js";
import { RetryPolicy } from "./retries.js";
import { Tally } from "./tally.js";
import type { Completion, Delta, ModelInfo, Prompt, RequestOptions, Sampling, Usage } from "./types.js";

const REPLY_TIMEOUT_S = 10; // of what is answered at once

export interface ClientOptions {
  /** The model of requests that name none; without it, the only one that is loaded. */
  model?: string;
  /** Default, where there is an environment: SHOAL_API_KEY. Never put one into a public page. */
  apiKey?: string;
  retries?: RetryPolicy;
  fetch?: Fetch;
}

/** Asks a Shoal server over its OpenAI endpoint, for example `http://localhost:9000`. */
export class Client {
  private readonly base: string;
  private readonly headers: Record<string, string>;
  private readonly retries: RetryPolicy;
  private readonly fetch: Fetch;
  private model: string | undefined;

  constructor(url: string, options: ClientOptions = {}) {
    if (!/^https?:\/\//.test(url)) {
      throw new ShoalError("url must begin with http:// or https://.", { status: 400, param: "url" });
    }
    this.base = url.replace(/\/+$/, "").replace(/\/v1$/, "");
    const apiKey = options.apiKey ?? environment("SHOAL_API_KEY");
    this.headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
    this.retries = options.retries ?? new RetryPolicy();
    this.fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
    this.model = options.model;
  }

  /** Run one request to its end. */
  async generate(
    prompt: Prompt,
    sampling: Sampling = {},
    options: RequestOptions = {},
  ): Promise<Completion> {
    const deadline = new Deadline(options.timeoutS, options.signal);
    try {
      const attempt = async (): Promise<Completion> => {
        const reply = await this.post(prompt, sampling, options, false, deadline.signal);
        const tally = new Tally();
        for (const delta of await readWhole(reply, deadline.signal)) tally.add(delta);
        return tally.completion();
      };
      return await this.retries.run(attempt, deadline.at, deadline.signal);
    } finally {
      deadline.release();
    }
  }

  /** One request, started by the first step of iteration over the result. */
  stream(prompt: Prompt, sampling: Sampling = {}, options: RequestOptions = {}): DeltaStream {
    return new DeltaStream(options, async (deadline) => {
      const attempt = async (): Promise<Started> => {
        const reply = await this.post(prompt, sampling, options, true, deadline.signal);
        const deltas = readEvents(reply, deadline.signal);
        return { first: await deltas.next(), deltas };
      };
      return this.retries.run(attempt, deadline.at, deadline.signal);
    });
  }

  /** The models that the server serves. */
  async models(): Promise<ModelInfo[]> {
    const { data } = await this.get<{ data: Array<{ id: string; ready?: boolean }> }>("/v1/models");
    return data.map(({ id, ready }) => {
      const [name = "", version = ""] = id.split("@", 2);
      return { name, version, ready: ready ?? true };
    });
  }

  /** Whether the model's engine answers and says it is ready. */
  async ready(model?: string): Promise<boolean> {
    try {
      const name = model ?? (await this.defaultModel());
      const { models } = await this.get<{ models: Record<string, string> }>("/health/ready");
      return models[name] === "ready";
    } catch (error) {
      if (error instanceof ShoalError) return false;
      throw error;
    }
  }

  private async post(
    prompt: Prompt,
    sampling: Sampling,
    options: RequestOptions,
    stream: boolean,
    signal: AbortSignal,
  ): Promise<Response> {
    if (typeof prompt !== "string" && (!Array.isArray(prompt) || prompt.length === 0)) {
      const text = "prompt must be text, token ids or messages, and not empty.";
      throw new ShoalError(text, { status: 400, param: "prompt" });
    }
    const isChat = typeof prompt !== "string" && typeof prompt[0] === "object";
    const model = options.model ?? (await this.defaultModel());
    const body = {
      ...sampling,
      model: options.version ? `${model}@${options.version}` : model,
      [isChat ? "messages" : "prompt"]: prompt,
      ...(stream ? { stream: true, stream_options: { include_usage: true } } : {}),
    };
    const path = isChat ? "/v1/chat/completions" : "/v1/completions";
    const headers = { ...this.headers, "content-type": "application/json" };
    const init = { method: "POST", headers, body: JSON.stringify(body) };
    return send(this.fetch, this.base + path, init, signal);
  }

  private async get<T>(path: string): Promise<T> {
    const deadline = new Deadline(REPLY_TIMEOUT_S, undefined);
    try {
      const init = { headers: this.headers };
      const reply = await send(this.fetch, this.base + path, init, deadline.signal);
      return await guarded(deadline.signal, async () => (await reply.json()) as T);
    } finally {
      deadline.release();
    }
  }

  private async defaultModel(): Promise<string> {
    if (this.model === undefined) {
      const loaded = (await this.models()).filter(({ ready }) => ready).map(({ name }) => name);
      const names = [...new Set(loaded)].sort();
      if (names.length > 1) {
        const text = `Name a model: ${names.join(", ")} are loaded.`;
        throw new ShoalError(text, { status: 400, param: "model" });
      }
      if (names[0] === undefined) throw unavailable("No model is loaded.");
      this.model = names[0];
    }
    return this.model;
  }
}

interface Started {
  first: IteratorResult<Delta>;
  deltas: AsyncGenerator<Delta>;
}

/**
 * The deltas of one answer, as they come. Leaving a `for await` early, `close`, or the request's
 * signal cancels it. `usage` and `finishReason` (null until the end) tell how far it is.
 */
export class DeltaStream implements AsyncIterableIterator<Delta> {
  private readonly tally = new Tally();
  private deadline: Deadline | null = null;
  private deltas: AsyncGenerator<Delta> | null = null;
  private isClosed = false;

  constructor(
    private readonly options: RequestOptions,
    private readonly start: (deadline: Deadline) => Promise<Started>,
  ) {}

  get usage(): Usage {
    return this.tally.usage;
  }

  get finishReason(): string | null {
    return this.tally.finishReason;
  }

  /** What has come so far, as one result. */
  completion(): Completion {
    return this.tally.completion();
  }

  /** Cancel the request unless it has ended. Idempotent. */
  async close(): Promise<void> {
    this.isClosed = true;
    this.deadline?.abort();
    await this.deltas?.return(undefined).catch(() => undefined);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<Delta>> {
    if (this.isClosed) return { done: true, value: undefined };
    let step: IteratorResult<Delta>;
    try {
      step = this.deltas === null ? await this.begin() : await this.deltas.next();
    } catch (error) {
      const wasClosed = this.isClosed;
      this.finish();
      if (wasClosed) return { done: true, value: undefined };
      throw error;
    }
    if (step.done) this.finish();
    else this.tally.add(step.value);
    return step;
  }

  async return(): Promise<IteratorResult<Delta>> {
    await this.close();
    return { done: true, value: undefined };
  }

  private async begin(): Promise<IteratorResult<Delta>> {
    this.deadline = new Deadline(this.options.timeoutS, this.options.signal);
    const { first, deltas } = await this.start(this.deadline);
    this.deltas = deltas;
    return first;
  }

  private finish(): void {
    this.isClosed = true;
    this.deadline?.release();
  }
}

function environment(name: string): string | undefined {
  const { process } = globalThis as { process?: { env?: Record<string, string | undefined> } };
  return process?.env?.[name];
}
