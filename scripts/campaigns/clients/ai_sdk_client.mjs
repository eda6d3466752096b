// Check Vercel's AI SDK over its client for OpenAI's form: texts, streams, calls, forms, its own errors, leaving.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import * as checks from "./checks.mjs";

const { BASE_URL, TOKEN, MODEL, expect, expectThrown } = checks;

function provider(apiKey = TOKEN) {
  return createOpenAICompatible({
    name: "service",
    baseURL: `${BASE_URL}/v1`,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
}

const model = provider()(MODEL);
const asked = { model, prompt: checks.QUESTION, maxOutputTokens: 8, maxRetries: 0, temperature: 0 };
const schema = z.object({ sunny: z.boolean() });
const inputSchema = z.object({ city: z.enum(["Austin", "Paris"]), days: z.number().int().min(1).max(9) });

async function whole_answer() {
  const { text, usage, finishReason } = await generateText(asked);
  expect(text && usage.inputTokens > 0 && usage.outputTokens <= 8, { text, usage });
  expect(["length", "stop"].includes(finishReason), finishReason);
}

async function streamed_answer() {
  const whole = await generateText(asked);
  const stream = streamText(asked);
  let said = "";
  for await (const piece of stream.textStream) said += piece;
  expect(said && said === whole.text, said);
  expect((await stream.usage).totalTokens === whole.usage.totalTokens, await stream.usage);
}

async function text() {
  const { text: said } = await generateText({ ...asked, model: provider().completionModel(MODEL) });
  expect(said, said);
}

async function forced_call() {
  const told = [];
  const execute = async (input) => {
    told.push(input);
    return "sunny";
  };
  const tools = { get_weather: tool({ description: "Tells it.", inputSchema, execute }) };
  const { toolResults } = await generateText({ ...asked, tools, toolChoice: "required", maxOutputTokens: 100 });
  checks.expectWeather(told[0]);
  expect(toolResults[0].output === "sunny", toolResults);
}

async function streamed_call() {
  const tools = { get_weather: tool({ description: "Tells it.", inputSchema }) };
  const stream = streamText({ ...asked, tools, toolChoice: "required", maxOutputTokens: 100 });
  const [call] = await stream.toolCalls;
  checks.expectWeather(call.input);
}

async function form() {
  const { object } = await generateObject({ ...asked, schema, maxOutputTokens: 60 });
  expect(typeof object.sunny === "boolean", object);
}

async function embeddings() {
  const values = ["Austin", "Paris", "Austin"];
  const { embeddings: made } = await embedMany({ model: provider().embeddingModel(MODEL), values, maxRetries: 0 });
  const [first, other, again] = made.map((one) => JSON.stringify(one));
  expect(first === again && first !== other, made.length);
}

async function wrong_jwt() {
  const ask = () => generateText({ ...asked, model: provider(checks.WRONG_JWT)(MODEL) });
  const error = await expectThrown(APICallError, ask, checks.WRONG_JWT_TEXT);
  expect(error.statusCode === 401 && !error.isRetryable, error.statusCode);
}

async function unknown_model() {
  const ask = () => generateText({ ...asked, model: provider()(checks.UNKNOWN_MODEL) });
  const error = await expectThrown(APICallError, ask, checks.UNKNOWN_MODEL_TEXT);
  expect(error.statusCode === 404 && error.data.error.code === "model_not_found", error.data);
}

async function context_overflow() {
  const ask = () => generateText({ ...asked, prompt: checks.TOO_LONG });
  const error = await expectThrown(APICallError, ask, checks.OVERFLOW_TEXT);
  expect(error.statusCode === 400 && error.data.error.code === "context_length_exceeded", error.data);
}

async function bad_parameter() {
  const error = await expectThrown(APICallError, () => generateText({ ...asked, temperature: 3.5 }), "temperature");
  expect(error.data.error.param === "temperature", error.data);
}

async function cancel() {
  const controller = new AbortController();
  const stream = streamText({
    ...asked,
    maxOutputTokens: checks.LONG_ANSWER_TOKENS,
    abortSignal: controller.signal,
    providerOptions: { service: { ignore_eos: true } },
  });
  for await (const _ of stream.textStream) {
    await checks.expectRowFreed(() => controller.abort());
    break;
  }
}

await checks.runChecks({
  whole_answer,
  streamed_answer,
  text,
  forced_call,
  streamed_call,
  form,
  embeddings,
  wrong_jwt,
  unknown_model,
  context_overflow,
  bad_parameter,
  cancel,
});
