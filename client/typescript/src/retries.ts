import { ShoalError } from "./errors.js";

const RETRIED_STATUSES: ReadonlySet<number> = new Set([429, 502, 503]);

export interface RetryFields {
  maxRetries?: number;
  firstWaitS?: number;
  maxWaitS?: number;
}

/**
 * At most `maxRetries` further attempts, after busy and unreachable servers only. The wait is the one
 * that the server names (`Retry-After`), never less, else it doubles from `firstWaitS`; a random part
 * keeps clients from coming back all at once. A server that names more than `maxWaitS` is not waited
 * for.
 */
export class RetryPolicy {
  readonly maxRetries: number;
  readonly firstWaitS: number;
  readonly maxWaitS: number;

  constructor({ maxRetries = 2, firstWaitS = 0.25, maxWaitS = 30 }: RetryFields = {}) {
    this.maxRetries = maxRetries;
    this.firstWaitS = firstWaitS;
    this.maxWaitS = maxWaitS;
  }

  /** Seconds to wait after the failed `attempt` (from 0); null: give up. */
  waitS(error: unknown, attempt: number): number | null {
    if (!(error instanceof ShoalError) || attempt >= this.maxRetries) return null;
    if (!RETRIED_STATUSES.has(error.status)) return null;
    if (error.retryAfterMs !== null) {
      const told = error.retryAfterMs / 1000;
      return told > this.maxWaitS ? null : told * (1 + Math.random() / 4);
    }
    return Math.min(this.firstWaitS * 2 ** attempt, this.maxWaitS) * (0.5 + Math.random() / 2);
  }

  /** Try until it works. `deadline`: in milliseconds of the clock; null: none. */
  async run<T>(work: () => Promise<T>, deadline: number | null, signal: AbortSignal): Promise<T> {
    for (let attempt = 0; ; attempt++) {
      try {
        return await work();
      } catch (error) {
        const waitS = this.waitS(error, attempt);
        if (waitS === null) throw error;
        if (deadline !== null && Date.now() + waitS * 1000 >= deadline) throw error;
        await sleep(waitS * 1000, signal);
      }
    }
  }
}

/** Wait; an abort ends it with the signal's reason. */
function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal.aborted) return reject(signal.reason);
    const onAbort = (): void => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", onAbort);
      resolve();
    }, ms);
    signal.addEventListener("abort", onAbort, { once: true });
  });
}
