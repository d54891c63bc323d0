// OpenAI's client for Node against the real server.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const model = process.env.SHOAL_CHECK_MODEL;
const options = { baseURL: `${process.env.SHOAL_CHECK_URL}/v1`, maxRetries: 0 };
const client = new OpenAI({ ...options, apiKey: process.env.SHOAL_CHECK_KEY });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 12 } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const city = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, size: { enum: ["small", "large"] } },
  required: ["name", "size"],
  additionalProperties: false,
};

test("models", async () => {
  const ids = [];
  for await (const entry of client.models.list()) ids.push(entry.id);
  assert.ok(ids.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("chat, whole and streamed", async () => {
  const ask = { model, messages, temperature: 0, max_tokens: 32 };
  const whole = await client.chat.completions.create(ask);
  assert.match(whole.choices[0].message.content, /Paris/);
  const stream = await client.chat.completions.create({
    ...ask,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("the stream helper", async () => {
  const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 16 });
  let pieces = 0;
  stream.on("content", () => (pieces += 1));
  const final = await stream.finalChatCompletion();
  assert.ok(pieces > 3);
  assert.match(final.choices[0].message.content, /Paris/);
  assert.ok(await stream.totalUsage());
});

test("structured output is parsed", async () => {
  const answer = await client.chat.completions.parse({
    model,
    messages,
    max_tokens: 64,
    temperature: 0,
    response_format: { type: "json_schema", json_schema: { name: "city", schema: city, strict: true } },
  });
  const parsed = JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(parsed).sort(), ["name", "size"]);
});

test("tools, and the helper that runs them", async () => {
  let asked;
  const run = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: "Weather in Paris?" }],
    max_tokens: 64,
    temperature: 0,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [
      {
        type: "function",
        function: {
          ...weather.function,
          parse: JSON.parse,
          function: (given) => ((asked = given.city), { temperature: 20 }),
        },
      },
    ],
  });
  await run.done();
  assert.equal(typeof asked, "string");
  const streamed = client.chat.completions.stream({
    model,
    messages: [{ role: "user", content: "Weather in Paris?" }],
    max_tokens: 64,
    tools: [weather],
    tool_choice: "required",
  });
  const message = await streamed.finalMessage();
  assert.deepEqual(Object.keys(JSON.parse(message.tool_calls[0].function.arguments)), ["city"]);
  const after = await client.chat.completions.create({
    model,
    messages: [
      { role: "user", content: "Weather in Paris?" },
      message,
      { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" },
    ],
    max_tokens: 8,
  });
  assert.equal(after.choices.length, 1);
});

test("completions and embeddings", async () => {
  const answer = await client.completions.create({
    model,
    prompt: "The capital of France is",
    max_tokens: 8,
    temperature: 0,
    logprobs: 2,
  });
  assert.match(answer.choices[0].text, /Paris/);
  assert.equal(answer.choices[0].logprobs.tokens.join(""), answer.choices[0].text);
  const { data } = await client.embeddings.create({ model, input: ["a", "b"] });
  const norm = data[1].embedding.reduce((sum, value) => sum + value * value, 0);
  assert.ok(Math.abs(norm - 1) < 1e-3);
});

test("responses", async () => {
  const ask = { model, temperature: 0, max_output_tokens: 32 };
  const first = await client.responses.create({ ...ask, input: "What is the capital of France?" });
  assert.match(first.output_text, /Paris/);
  const stream = client.responses.stream({
    ...ask,
    input: "And of Italy?",
    previous_response_id: first.id,
  });
  for await (const event of stream) assert.ok(event.type);
  const second = await stream.finalResponse();
  assert.equal((await client.responses.retrieve(second.id)).output_text, second.output_text);
  await client.responses.delete(second.id);
  await assert.rejects(client.responses.retrieve(second.id), OpenAI.NotFoundError);
});

test("errors have classes", async () => {
  const ask = (more) => client.chat.completions.create({ model, messages, ...more });
  await assert.rejects(ask({ temperature: 9 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(ask({ model: "nope" }), OpenAI.NotFoundError);
  const stranger = new OpenAI({ ...options, apiKey: "sk-wrong" });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});

test("a refused request is asked again after the told wait", async () => {
  const limited = new OpenAI({ ...options, apiKey: process.env.SHOAL_CHECK_LIMITED_KEY });
  const ask = () => limited.chat.completions.create({ model, messages, max_tokens: 1 });
  let refused;
  for (let idx = 0; idx < 40 && !refused; idx += 1) {
    await ask().catch((error) => (refused = error));
  }
  assert.ok(refused instanceof OpenAI.RateLimitError);
  const patient = limited.withOptions({ maxRetries: 2 });
  const answer = await patient.chat.completions.create({ model, messages, max_tokens: 1 });
  assert.equal(answer.choices.length, 1);
});

test("an aborted stream ends", async () => {
  const stream = await client.chat.completions.create({
    model,
    messages,
    max_tokens: 400,
    stream: true,
  });
  for await (const _ of stream) break;
});
