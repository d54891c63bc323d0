import { afterAll, beforeAll, beforeEach, describe, expect, it } from "vitest";

import { retryAfter } from "../src/errors.js";
import { EventReader } from "../src/event-reader.js";
import { Client, RetryPolicy, ShoalError } from "../src/index.js";
import { chunk, completion, END, error, FakeServer, json, LAST } from "./fake-server.js";

const server = new FakeServer();
const quick = new RetryPolicy({ maxRetries: 2, firstWaitS: 0.01 });
let client: Client;

beforeAll(() => server.start());
afterAll(() => server.stop());
beforeEach(() => {
  server.seen.length = 0;
  client = new Client(`${server.url}/v1/`, { model: "m", apiKey: "secret", retries: quick });
});

/** The error that a promise is rejected with. */
async function failure(work: Promise<unknown>): Promise<ShoalError> {
  const caught = await work.then(
    () => undefined,
    (cause: unknown) => cause,
  );
  expect(caught).toBeInstanceOf(ShoalError);
  return caught as ShoalError;
}

async function nextPath(count = 1): Promise<void> {
  while (server.seen.length < count) await new Promise((resolve) => setTimeout(resolve, 5));
}

describe("requests", () => {
  it("go where the prompt belongs, with the key", async () => {
    server.script = completion("yes");
    const answer = await client.generate("a", { max_tokens: 3 }, { version: "2" });
    expect(answer).toEqual({
      text: "yes",
      reasoning: "",
      toolCalls: [],
      finishReason: "stop",
      usage: { promptTokens: 2, completionTokens: 3, cachedTokens: 1, totalTokens: 5 },
      others: [],
    });
    await client.generate([1, 2]);
    await client.generate([{ role: "user", content: "hi" }]);
    expect(server.seen.map(({ path }) => path)).toEqual([
      "/v1/completions",
      "/v1/completions",
      "/v1/chat/completions",
    ]);
    expect(server.seen[0]?.body).toEqual({ model: "m@2", prompt: "a", max_tokens: 3 });
    expect(server.seen[0]?.headers.authorization).toBe("Bearer secret");
  });

  it("ask for the only loaded model", async () => {
    const names = ["b"];
    server.script = (reply, { path, body }) => {
      if (path === "/v1/models") json(reply, { data: names.map((id) => ({ id, ready: true })) });
      else void completion(body.model)(reply, {} as never);
    };
    expect((await new Client(server.url).generate("a")).text).toBe("b");
    names.push("c");
    expect((await failure(new Client(server.url).generate("a"))).message).toContain("b, c");
    names.length = 0;
    expect((await failure(new Client(server.url, { retries: quick }).generate("a"))).status).toBe(503);
  });

  it("tell models and readiness", async () => {
    server.script = (reply, { path }) =>
      path === "/v1/models"
        ? json(reply, { data: [{ id: "m@2", ready: false }] })
        : json(reply, { models: { m: "ready", n: "stuck" } });
    expect(await client.models()).toEqual([{ name: "m", version: "2", ready: false }]);
    expect(await client.ready()).toBe(true);
    expect(await client.ready("n")).toBe(false);
    server.script = error(503, "no");
    expect(await client.ready()).toBe(false);
  });

  it("are refused here when they cannot be right", async () => {
    expect((await failure(client.generate([]))).message).toContain("not empty");
    expect(() => new Client("localhost:9000")).toThrow("http://");
    expect(server.seen).toEqual([]);
  });
});

describe("streams", () => {
  it("join to the whole, whatever the pieces", async () => {
    const text = "a\u2028b\u2029\u0085é😀\r\n\rz";
    const bytes = Buffer.from([...text].map((part) => chunk({ text: part })).join("") + END + LAST);
    for (const size of [1, 3, bytes.length]) {
      server.script = async (reply) => {
        for (let i = 0; i < bytes.length; i += size) reply.write(bytes.subarray(i, i + size));
        reply.end();
      };
      const stream = client.stream("a");
      let joined = "";
      for await (const delta of stream) joined += delta.text;
      expect(joined).toBe(text);
      expect(stream.finishReason).toBe("stop");
      expect(stream.usage.totalTokens).toBe(5);
      expect(stream.completion().text).toBe(text);
    }
    expect(server.seen[0]?.body.stream_options).toEqual({ include_usage: true });
  });

  it("tell choices, thoughts and calls apart", async () => {
    const call = { index: 0, id: "c1", function: { name: "look", arguments: "" } };
    const more = (part: string): object => ({ index: 0, function: { arguments: part } });
    server.script = (reply) => {
      reply.write(chunk({ delta: { role: "assistant", content: "" } }));
      reply.write(chunk({ delta: { reasoning_content: "hm" } }));
      reply.write(chunk({ delta: { tool_calls: [call] } }));
      reply.write(chunk({ delta: { tool_calls: [more('{"a"')] } }));
      reply.write(chunk({ delta: { tool_calls: [more(":1}")] } }));
      reply.write(chunk({ index: 1, delta: { content: "other" } }));
      reply.write(chunk({ delta: {}, finish_reason: "tool_calls" }));
      reply.write(chunk({ index: 1, delta: {}, finish_reason: "length" }));
      reply.end(LAST);
    };
    const stream = client.stream([{ role: "user", content: "hi" }], { n: 2 });
    for await (const _ of stream);
    const answer = stream.completion();
    expect(answer.toolCalls).toEqual([{ id: "c1", name: "look", arguments: '{"a":1}' }]);
    expect([answer.reasoning, answer.finishReason]).toEqual(["hm", "tool_calls"]);
    expect([answer.others[0]?.text, answer.others[0]?.finishReason]).toEqual(["other", "length"]);
  });

  it("end with an error where the server's do", async () => {
    const wrong = { error: { message: "lost", type: "service_unavailable_error" } };
    server.script = (reply) => {
      reply.write(chunk({ text: "x" }));
      reply.end(`data: ${JSON.stringify(wrong)}\n\n`);
    };
    const stream = client.stream("a");
    expect((await stream.next()).value?.text).toBe("x");
    expect((await failure(stream.next())).status).toBe(503);
    expect(await stream.next()).toEqual({ done: true, value: undefined });
    expect(server.seen.length).toBe(1); // a part had come out: no second attempt

    server.script = (reply) => void reply.end(chunk({ text: "x" }));
    const cut = client.stream("a");
    await cut.next();
    expect((await failure(cut.next())).message).toContain("before it was finished");
  });
});

describe("cancellation", () => {
  const endless = (reply: any): void => {
    const timer = setInterval(() => reply.write(chunk({ text: "x" })), 5);
    reply.on("close", () => clearInterval(timer));
  };

  it("by leaving the loop", async () => {
    server.script = endless;
    for await (const _ of client.stream("a")) break;
    await server.seen[0]?.hungUp;
  });

  it("by closing, also while it waits", async () => {
    server.script = () => undefined;
    const stream = client.stream("a");
    const step = stream.next();
    await nextPath();
    await stream.close();
    expect(await step).toEqual({ done: true, value: undefined });
    await server.seen[0]?.hungUp;
  });

  it("by a signal", async () => {
    const controller = new AbortController();
    server.script = () => undefined;
    const answer = client.generate("a", {}, { signal: controller.signal });
    await nextPath();
    controller.abort(new Error("enough"));
    await expect(answer).rejects.toThrow("enough");
    await server.seen[0]?.hungUp;
    await expect(client.generate("a", {}, { signal: controller.signal })).rejects.toThrow("enough");
    expect(server.seen.length).toBe(1);
  });

  it("by the timeout", async () => {
    server.script = endless;
    const read = async (): Promise<void> => {
      for await (const _ of client.stream("a", {}, { timeoutS: 0.2 }));
    };
    const caught = await failure(read());
    expect([caught.status, caught.code]).toEqual([504, "timeout"]);
    await server.seen[0]?.hungUp;
  });
});

describe("failures", () => {
  it("have the server's words", async () => {
    server.script = error(400, "top_p is wrong");
    for (const work of [client.generate("a"), client.stream("a").next()]) {
      const caught = await failure(work);
      expect([caught.message, caught.status]).toEqual(["top_p is wrong", 400]);
      expect([caught.param, caught.code]).toEqual(["top_p", "some_code"]);
    }
    expect(server.seen.length).toBe(2);
  });

  it("are tried again when the server was busy, not before it says", async () => {
    for (const ask of [() => client.generate("a"), () => client.stream("a").next()]) {
      server.seen.length = 0;
      const started = Date.now();
      server.script = (reply, seen) => {
        if (server.seen.length < 3) void error(429, "busy", { "retry-after-ms": "30" })(reply, seen);
        else if (seen.body.stream) reply.end(chunk({ text: "x" }) + END + LAST);
        else void completion("x")(reply, seen);
      };
      await ask();
      expect(server.seen.length).toBe(3);
      expect(Date.now() - started).toBeGreaterThanOrEqual(60);
    }
  });

  it("are not tried for ever", async () => {
    server.script = error(503, "busy");
    expect((await failure(client.generate("a"))).message).toBe("busy");
    expect(server.seen.length).toBe(3);
    const once: Array<[number, object, object]> = [
      [500, {}, {}],
      [429, { "retry-after": "60" }, {}], // more than anybody wants to wait
      [429, { "retry-after": "5" }, { timeoutS: 1 }], // more than the timeout allows
    ];
    for (const [status, headers, options] of once) {
      server.seen.length = 0;
      server.script = error(status, "no", headers);
      await failure(client.generate("a", {}, options));
      expect(server.seen.length).toBe(1);
    }
  });

  it("of other kinds of servers", async () => {
    const noUsage = '{"choices":[{"index":0}],"usage":{}}';
    for (const body of ["", "[]", "{}", '{"choices":[{}],"usage":{}}', noUsage, "<html>"]) {
      server.script = (reply) => json(reply, body);
      expect((await failure(client.generate("a"))).status).toBe(502);
    }
    server.script = (reply) => json(reply, "<html>", 404);
    expect((await failure(client.generate("a"))).message).toContain("404");
    const nobody = new Client("http://127.0.0.1:9", { model: "m", retries: quick });
    expect((await failure(nobody.generate("a"))).message).toContain("cannot be reached");
  });
});

describe("parts", () => {
  it("read events in any pieces", () => {
    const text = "data: a\r\n\r\n: note\ndata:b\ndata: c\n\nevent: x\nid: 1\n\ndata: d\u2028\r\rdata: e";
    for (const size of [1, 2, 3, 5, text.length]) {
      const reader = new EventReader();
      const events: string[] = [];
      for (let i = 0; i < text.length; i += size) events.push(...reader.feed(text.slice(i, i + size)));
      expect(events).toEqual(["a", "b\nc", "d\u2028"]);
    }
  });

  it("read Retry-After in all its forms", () => {
    const read = (headers: Record<string, string>): number | null =>
      retryAfter(new Headers(headers), Date.parse("2030-01-01T00:00:00Z"));
    expect(read({ "retry-after": "7" })).toBe(7000);
    expect(read({ "retry-after": "7", "retry-after-ms": "20" })).toBe(20);
    expect(read({ "retry-after": "Tue, 01 Jan 2030 00:01:00 GMT" })).toBe(60_000);
    expect(read({ "retry-after": "Tue, 01 Jan 2019 00:01:00 GMT" })).toBe(0);
    expect(read({ "retry-after": "soon" })).toBe(null);
    expect(read({})).toBe(null);
  });

  it("wait within bounds, and not all at once", () => {
    const policy = new RetryPolicy({ maxRetries: 9, firstWaitS: 1, maxWaitS: 4 });
    const busy = new ShoalError("busy", { status: 503 });
    for (const [attempt, longest] of [1, 2, 4, 4].entries()) {
      const waits = Array.from({ length: 20 }, () => policy.waitS(busy, attempt) ?? -1);
      expect(waits.every((wait) => wait >= longest / 2 && wait <= longest)).toBe(true);
      expect(new Set(waits).size).toBeGreaterThan(10);
    }
    expect(policy.waitS(busy, 9)).toBe(null);
    expect(policy.waitS(new Error("other"), 0)).toBe(null);
  });
});
