// Check OpenAI's JavaScript client: chat, text, responses, streams, calls, forms, errors, leaving.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as checks from "./checks.mjs";

const { BASE_URL, TOKEN, MODEL, expect, expectThrown } = checks;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: TOKEN, maxRetries: 0 });
const messages = [{ role: "user", content: checks.QUESTION }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Austin", "Paris"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", description: "Tells it.", parameters } }];

async function models() {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  expect(ids.includes(MODEL), ids);
}

async function whole_chat() {
  const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 8, temperature: 0 });
  const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
  expect(answer.choices[0].message.content && answer._request_id, answer);
  expect(prompt_tokens > 0 && completion_tokens <= 8 && total_tokens === prompt_tokens + completion_tokens, answer);
}

async function streamed_chat() {
  const asked = { model: MODEL, messages, max_tokens: 8, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  const options = { ...asked, stream: true, stream_options: { include_usage: true } };
  let said = "";
  let last;
  for await (const chunk of await client.chat.completions.create(options)) {
    said += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  expect(said === whole.choices[0].message.content, said);
  expect(last.usage.total_tokens === whole.usage.total_tokens, last);
}

async function text() {
  const asked = { model: MODEL, prompt: "The capital of France is", max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create(asked);
  let said = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) said += chunk.choices[0].text;
  expect(said && said === whole.choices[0].text, said);
}

async function forced_call() {
  const asked = { model: MODEL, messages, tools, tool_choice: "required", max_tokens: 100 };
  const said = (await client.chat.completions.create(asked)).choices[0].message;
  const [call] = said.tool_calls;
  checks.expectWeather(JSON.parse(call.function.arguments));
  const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
  const after = await client.chat.completions.create({ model: MODEL, messages: [...messages, said, result], max_tokens: 4 });
  expect(["length", "stop"].includes(after.choices[0].finish_reason), after);
}

async function streamed_call() {
  const stream = client.chat.completions.stream({ model: MODEL, messages, tools, tool_choice: "required", max_tokens: 100 });
  const final = await stream.finalMessage();
  checks.expectWeather(JSON.parse(final.tool_calls[0].function.arguments));
}

async function form() {
  const response_format = zodResponseFormat(z.object({ sunny: z.boolean() }), "weather");
  const answer = await client.chat.completions.parse({ model: MODEL, messages, response_format, max_tokens: 60 });
  expect(typeof answer.choices[0].message.parsed.sunny === "boolean", answer);
}

async function responses() {
  const asked = { model: MODEL, input: checks.QUESTION, max_output_tokens: 16, temperature: 0 };
  const whole = await client.responses.create(asked);
  let said = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") said += event.delta;
  }
  expect(said && said === whole.output_text && whole.usage.output_tokens <= 16, said);
}

async function embeddings() {
  const { data } = await client.embeddings.create({ model: MODEL, input: ["Austin", "Paris", "Austin"] });
  const [first, other, again] = data.map((item) => JSON.stringify(item.embedding));
  expect(first === again && first !== other && data[0].embedding.length === data[1].embedding.length, data.length);
}

async function wrong_jwt() {
  const stranger = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: checks.WRONG_JWT, maxRetries: 0 });
  await expectThrown(OpenAI.AuthenticationError, () => stranger.models.list(), checks.WRONG_JWT_TEXT);
}

async function unknown_model() {
  const ask = () => client.chat.completions.create({ model: checks.UNKNOWN_MODEL, messages });
  const error = await expectThrown(OpenAI.NotFoundError, ask, checks.UNKNOWN_MODEL_TEXT);
  expect(error.code === "model_not_found", error.code);
}

async function context_overflow() {
  const long = [{ role: "user", content: checks.TOO_LONG }];
  const ask = () => client.chat.completions.create({ model: MODEL, messages: long });
  const error = await expectThrown(OpenAI.BadRequestError, ask, checks.OVERFLOW_TEXT);
  expect(error.code === "context_length_exceeded", error.code);
}

async function bad_parameter() {
  const ask = () => client.chat.completions.create({ model: MODEL, messages, temperature: 3.5 });
  const error = await expectThrown(OpenAI.BadRequestError, ask, "temperature");
  expect(error.param === "temperature", error.param);
}

async function cancel() {
  const asked = { model: MODEL, messages, max_tokens: checks.LONG_ANSWER_TOKENS, stream: true, ignore_eos: true };
  const stream = await client.chat.completions.create(asked);
  for await (const _ of stream) {
    await checks.expectRowFreed(() => stream.controller.abort());
    break;
  }
}

await checks.runChecks({
  models,
  whole_chat,
  streamed_chat,
  text,
  forced_call,
  streamed_call,
  form,
  responses,
  embeddings,
  wrong_jwt,
  unknown_model,
  context_overflow,
  bad_parameter,
  cancel,
});
