/** Against a running server: SHOAL_TEST_URL, SHOAL_TEST_MODEL, and SHOAL_API_KEY if it wants a key. */

import { describe, expect, it } from "vitest";

import { Client, ShoalError } from "../src/index.js";

const url = process.env["SHOAL_TEST_URL"];
const model = process.env["SHOAL_TEST_MODEL"] ?? "smollm2-135m-instruct";

describe.skipIf(!url)("a real server", () => {
  const client = new Client(url ?? "http://unused", { model });
  const question = [{ role: "user", content: "What is the capital of France?" }];
  const greedy = { temperature: 0, max_tokens: 24 };

  it("answers, whole and streamed alike", async () => {
    const whole = await client.generate(question, greedy);
    const stream = client.stream(question, greedy);
    const pieces: string[] = [];
    for await (const delta of stream) pieces.push(delta.text);
    expect(whole.text).toContain("Paris");
    expect(pieces.length).toBeGreaterThan(3);
    expect(pieces.join("")).toBe(whole.text);
    const { cachedTokens: _, ...usage } = whole.usage;
    expect(stream.usage).toMatchObject(usage);
    expect(stream.finishReason).toBe(whole.finishReason);
  });

  it("completes text and token ids, with several choices", async () => {
    const text = await client.generate("The capital of France is", { ...greedy, max_tokens: 4 });
    expect(text.usage.completionTokens).toBe(4);
    const ids = await client.generate([504, 3575, 282], { ...greedy, max_tokens: 2, n: 2 });
    expect(ids.others.length).toBe(1);
    expect(ids.usage.completionTokens).toBe(4);
  });

  it("refuses by name", async () => {
    const caught = await client.generate("a", { top_p: 7 }).catch((error: unknown) => error);
    expect(caught).toBeInstanceOf(ShoalError);
    expect(caught).toMatchObject({ status: 400, param: "top_p" });
    const other = await client.generate("a", {}, { model: "nope" }).catch((error: unknown) => error);
    expect(other).toMatchObject({ status: 404, code: "model_not_found" });
  });

  it("takes back what was cancelled", async () => {
    const running = async (): Promise<number> => {
      const headers: Record<string, string> = {};
      const key = process.env["SHOAL_API_KEY"];
      if (key) headers["authorization"] = `Bearer ${key}`;
      const reply = await fetch(`${url}/health`, { headers });
      const { models } = (await reply.json()) as { models: Record<string, { num_live: number }> };
      return models[model]?.num_live ?? -1;
    };
    for await (const _ of client.stream("Once", { max_tokens: 2000, ignore_eos: true })) break;
    await expect.poll(running, { timeout: 10_000 }).toBe(0);
  });

  it("is ready, and says what it serves", async () => {
    expect(await client.ready()).toBe(true);
    expect((await client.models()).map(({ name }) => name)).toContain(model);
  });
});
