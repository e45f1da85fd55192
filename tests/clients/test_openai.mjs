// The `openai` package for JavaScript. `test_npm.py` runs this, with the server's address in the environment.

import assert from "node:assert/strict";
import test from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ maxRetries: 0 }); // OPENAI_BASE_URL and OPENAI_API_KEY
const HI = [{ role: "user", content: "What is the weather?" }];
const CHAT = { model: "tiny", temperature: 0, max_tokens: 16, messages: HI };
const LONG = { ...CHAT, max_tokens: 400, ignore_eos: true, n: 4 };
const WEATHER = {
  type: "function",
  function: {
    name: "weather",
    description: "Of places.",
    parameters: {
      type: "object",
      properties: { places: { type: "array", items: { type: "string", maxLength: 20 }, maxItems: 3 } },
      required: ["places"],
      additionalProperties: false,
    },
  },
};
const Forecast = z.object({
  place: z.string().max(20),
  sky: z.object({ cover: z.enum(["clear", "cloudy"]), wind: z.number().int().min(0).max(12) }),
  rain: z.boolean(),
});

async function untilIdle() {
  const address = new URL("/metrics", client.baseURL);
  const headers = { authorization: `Bearer ${client.apiKey}` };
  for (let i = 0; i < 500; i++) {
    const text = await (await fetch(address, { headers })).text();
    if (/^jpaged_sequences_running(\{.*\})? 0(\.0)?$/m.test(text)) return;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.fail("the work of a client that has left goes on");
}

test("a chat that is streamed is the plain one in parts", async () => {
  const asked = { ...CHAT, logprobs: true, top_logprobs: 2 };
  const whole = await client.chat.completions.create(asked);
  let text = "", usage;
  const told = [];
  for await (const chunk of await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  })) {
    text += chunk.choices[0]?.delta.content ?? "";
    told.push(...(chunk.choices[0]?.logprobs?.content ?? []));
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(told, whole.choices[0].logprobs.content);
  assert.equal(usage.total_tokens, whole.usage.total_tokens);
});

test("the stream helper adds a chat up to the plain one", async () => {
  const whole = await client.chat.completions.create({ ...CHAT, stop: ["e"] });
  const stream = client.chat.completions.stream({ ...CHAT, stop: ["e"] });
  const deltas = [];
  stream.on("content", (delta) => deltas.push(delta));
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  assert.equal(deltas.join(""), whole.choices[0].message.content);
  assert.equal((await stream.finalChatCompletion()).choices[0].finish_reason, "stop");
});

for (const choice of ["auto", "required", { type: "function", function: { name: "weather" } }]) {
  test(`a call is streamed to the helper with the tool choice ${JSON.stringify(choice)}`, async () => {
    const asked = { ...CHAT, max_tokens: 300, tools: [WEATHER], tool_choice: choice, parallel_tool_calls: false };
    const [plain] = (await client.chat.completions.create(asked)).choices[0].message.tool_calls;
    const stream = client.chat.completions.stream(asked);
    const deltas = [], done = [];
    stream.on("tool_calls.function.arguments.delta", (event) => deltas.push(event.arguments_delta));
    stream.on("tool_calls.function.arguments.done", (event) => done.push(event));
    const [call] = (await stream.finalMessage()).tool_calls;
    assert.deepEqual(call.function, { ...call.function, ...plain.function });
    assert.equal(deltas.join(""), plain.function.arguments);
    assert.equal(done[0].arguments, plain.function.arguments);
    assert.ok(Array.isArray(JSON.parse(call.function.arguments).places));
  });
}

test("tools are run and their results answered", async () => {
  const places = [];
  const weather = {
    ...WEATHER.function,
    parse: JSON.parse,
    function: (given) => (places.push(...given.places), "cold"),
  };
  const runner = client.chat.completions.runTools({
    ...CHAT,
    max_tokens: 60,
    tools: [{ type: "function", function: weather }],
  });
  assert.ok(await runner.finalContent());
  assert.deepEqual(places, ["Oslo"]);
});

test("an answer is parsed into the shape of a zod schema", async () => {
  const format = zodResponseFormat(Forecast, "forecast");
  const asked = { ...CHAT, max_tokens: 150, response_format: format };
  const { parsed } = (await client.chat.completions.parse(asked)).choices[0].message;
  assert.deepEqual(Forecast.parse(parsed), parsed);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, parsed);
  const tool = zodFunction({ name: "forecast", parameters: Forecast });
  const called = await client.chat.completions.parse({
    ...CHAT,
    max_tokens: 150,
    tools: [tool],
    tool_choice: { type: "function", function: { name: "forecast" } },
  });
  const given = called.choices[0].message.tool_calls[0].function.parsed_arguments;
  assert.deepEqual(Forecast.parse(given), given);
});

test("texts are completed, plain and streamed", async () => {
  const asked = { model: "tiny", prompt: "Once upon", temperature: 0, echo: true, logprobs: 1 };
  const whole = await client.completions.create(asked);
  let text = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) text += chunk.choices[0].text;
  assert.ok(text.startsWith("Once upon"));
  assert.equal(text, whole.choices[0].text);
  assert.equal(whole.choices[0].logprobs.token_logprobs[0], null);
});

test("models are listed and retrieved", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, ["tiny", "org/tiny"]);
  for (const name of names) assert.equal((await client.models.retrieve(name)).id, name);
});

test("errors are raised as the exceptions that are meant for them", async () => {
  for (const stream of [false, true]) {
    const refused = async (kind, more, of = client) => {
      let found;
      await assert.rejects(of.chat.completions.create({ ...CHAT, stream, ...more }), (error) => ((found = error), true));
      assert.ok(found instanceof kind, `${found}`);
      return found;
    };
    const error = await refused(OpenAI.BadRequestError, { temperature: -1 });
    assert.deepEqual([error.status, error.param, error.type], [400, "temperature", "invalid_request_error"]);
    assert.ok(error.requestID && error.message.includes("temperature"));
    await refused(OpenAI.NotFoundError, { model: "gpt-4o" });
    const filling = { model: "tiny", prompt: "A", n: 40, max_tokens: 100, ignore_eos: true, stream: true };
    const filled = await client.completions.create(filling);
    await refused(OpenAI.RateLimitError, { n: 40 });
    filled.controller.abort();
    await untilIdle();
    await refused(OpenAI.AuthenticationError, {}, new OpenAI({ apiKey: "sk-wrong", maxRetries: 0 }));
  }
});

test("what is aborted ends the work", async () => {
  const stream = await client.chat.completions.create({ ...LONG, stream: true });
  for await (const _ of stream) break;
  await untilIdle();
  const other = await client.chat.completions.create({ ...LONG, stream: true });
  await assert.doesNotReject(async () => {
    for await (const _ of other) other.controller.abort();
  });
  await untilIdle();
  const controller = new AbortController();
  setTimeout(() => controller.abort(), 100);
  await assert.rejects(client.chat.completions.create(LONG, { signal: controller.signal }), OpenAI.APIUserAbortError);
  await untilIdle();
});

test("many at once get the answers that each gets alone", async () => {
  const ask = async (number) =>
    (await client.completions.create({ ...CHAT, messages: undefined, prompt: `Number ${number} is` })).choices[0].text;
  const together = await Promise.all([...Array(20).keys()].map(ask));
  assert.equal(together[7], await ask(7));
  assert.equal(together[19], await ask(19));
});
