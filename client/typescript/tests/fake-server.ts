/** An HTTP server whose answers a test writes; it notes when a caller hangs up. */

import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

export interface Seen {
  path: string;
  body: any;
  headers: IncomingMessage["headers"];
  hungUp: Promise<void>;
}

export type Script = (reply: ServerResponse, seen: Seen) => void | Promise<void>;

export class FakeServer {
  readonly seen: Seen[] = [];
  script: Script = () => undefined;
  private readonly server: Server = createServer((request, reply) => void this.answer(request, reply));

  async start(): Promise<void> {
    await new Promise<void>((resolve) => this.server.listen(0, "127.0.0.1", resolve));
  }

  get url(): string {
    return `http://127.0.0.1:${(this.server.address() as AddressInfo).port}`;
  }

  async stop(): Promise<void> {
    this.server.closeAllConnections();
    await new Promise((resolve) => this.server.close(resolve));
  }

  private async answer(request: IncomingMessage, reply: ServerResponse): Promise<void> {
    let text = "";
    for await (const piece of request) text += piece;
    const hungUp = new Promise<void>((resolve) => reply.on("close", () => resolve()));
    const body = text ? JSON.parse(text) : null;
    const seen = { path: request.url ?? "", body, headers: request.headers, hungUp };
    this.seen.push(seen);
    await this.script(reply, seen);
  }
}

export function json(reply: ServerResponse, body: unknown, status = 200, headers = {}): void {
  reply.writeHead(status, { "content-type": "application/json", ...headers });
  reply.end(typeof body === "string" ? body : JSON.stringify(body));
}

export function error(status: number, message: string, headers = {}): Script {
  const body = { error: { message, type: "x", param: "top_p", code: "some_code" } };
  return (reply) => json(reply, body, status, headers);
}

export const USAGE = {
  prompt_tokens: 2,
  completion_tokens: 3,
  prompt_tokens_details: { cached_tokens: 1 },
};

export function chunk(choice: object, usage: object | null = null): string {
  const choices = [{ index: 0, finish_reason: null, ...choice }];
  return `data: ${JSON.stringify({ choices, usage })}\n\n`;
}

export const END = chunk({ finish_reason: "stop", text: "" });
export const LAST = `data: ${JSON.stringify({ choices: [], usage: USAGE })}\n\ndata: [DONE]\n\n`;

export function completion(text: string): Script {
  const choices = [{ index: 0, text, finish_reason: "stop" }];
  return (reply) => json(reply, { choices, usage: USAGE });
}
