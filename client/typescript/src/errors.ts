/** The one error of the SDK, in the terms of the OpenAI API. */

export interface ErrorFields {
  status: number;
  code?: string | null;
  param?: string | null;
  type?: string;
  retryAfterMs?: number | null;
  cause?: unknown;
}

const STATUS_OF_TYPE: Record<string, number> = {
  service_unavailable_error: 503,
  rate_limit_error: 429,
};

/** A request that failed. */
export class ShoalError extends Error {
  readonly status: number;
  readonly code: string | null;
  readonly param: string | null;
  readonly type: string;
  readonly retryAfterMs: number | null;

  constructor(message: string, fields: ErrorFields) {
    super(message, fields.cause === undefined ? undefined : { cause: fields.cause });
    this.name = "ShoalError";
    this.status = fields.status;
    this.code = fields.code ?? null;
    this.param = fields.param ?? null;
    this.type = fields.type ?? "";
    this.retryAfterMs = fields.retryAfterMs ?? null;
  }
}

export function unavailable(message: string, cause?: unknown): ShoalError {
  return new ShoalError(message, { status: 503, code: "service_unavailable", cause });
}

export function timedOut(): ShoalError {
  return new ShoalError("The request took longer than its timeout.", {
    status: 504,
    code: "timeout",
  });
}

/** What an answer with an error status says, whoever wrote it. */
export async function errorOf(reply: Response): Promise<ShoalError> {
  const retryAfterMs = retryAfter(reply.headers);
  try {
    const body = JSON.parse(await reply.text()) as { error: unknown };
    return errorFrom(body.error, reply.status, retryAfterMs);
  } catch (cause) {
    if (cause instanceof DOMException) throw cause;
    const text = `The server answered ${reply.status} ${reply.statusText}.`;
    return new ShoalError(text, { status: reply.status, retryAfterMs });
  }
}

/** An error as the server writes it; inside a stream it has no status of its own. */
export function errorFrom(values: unknown, status = 0, retryAfterMs: number | null = null): ShoalError {
  const { message, type, code, param } = values as Record<string, string | null | undefined>;
  if (typeof message !== "string") throw new TypeError("no message");
  return new ShoalError(message, {
    status: status || (STATUS_OF_TYPE[type ?? ""] ?? 500),
    code: code ?? null,
    param: param ?? null,
    type: type ?? "",
    retryAfterMs,
  });
}

/** The wait that an answer asks for, in any of its forms. */
export function retryAfter(headers: Headers, now = Date.now()): number | null {
  const exact = headers.get("retry-after-ms");
  if (exact !== null && Number.isFinite(Number(exact))) return Math.max(Number(exact), 0);
  const told = headers.get("retry-after");
  if (told === null || told.trim() === "") return null;
  if (Number.isFinite(Number(told))) return Math.max(Number(told) * 1000, 0);
  const at = Date.parse(told);
  return Number.isNaN(at) ? null : Math.max(at - now, 0);
}
