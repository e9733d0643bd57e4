// Clients on npm: `node_clients.mjs NAME URL KEY MODEL EMBEDDING_URL` prints a row of the table.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [name, url, key, model, embeddingUrl] = process.argv.slice(2);
// the packages are where `make test-clients` has installed them, not beside this file
const require = createRequire(`${process.env.CLIENTS_NODE}/package.json`);
const load = async (one) => require(one);
const [v1, embeddingV1] = [url, embeddingUrl].map((one) => `${one}/v1`);
const counted = "3 4 5 6 7 8 9";
const count = "count from 3 to 9";
const repeat = 'repeat: <tool_call>{"name": "take", "arguments": {"x": 1}}</tool_call>';
const messages = [{ role: "user", content: count }];
const callMessages = [{ role: "user", content: repeat }];
const parameters = { type: "object", properties: { x: { type: "integer" } }, required: ["x"] };
const schema = {
  type: "object",
  properties: { size: { enum: [1, 2] }, is_long: { type: "boolean" } },
  required: ["size", "is_long"],
  additionalProperties: false,
};

function check(found, expected) {
  const texts = [found, expected].map((one) => JSON.stringify(one));
  if (texts[0] !== texts[1]) throw new Error(`got ${texts[0]}, expected ${texts[1]}`);
}

async function checkPieces(pieces) {
  const texts = [];
  for await (const piece of pieces) if (piece) texts.push(piece);
  check(texts.join(""), counted);
  check(texts.length > 1, true);
}

function checkAnswer(answer) {
  check(Object.keys(answer).sort(), ["is_long", "size"]);
  check([1, 2].includes(answer.size) && typeof answer.is_long === "boolean", true);
}

function checkVectors(vectors) {
  check(vectors.length, 2);
  check(vectors[0].length === vectors[1].length && vectors[0].length > 1, true);
}

async function* mapped(items, convert) {
  for await (const item of items) yield convert(item);
}

async function openai() {
  const { OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: v1, apiKey: key, maxRetries: 0 });
  const create = (fields) => client.chat.completions.create({ model, messages, ...fields });
  return {
    async text() {
      check((await create({})).choices[0].message.content, counted);
      check((await client.responses.create({ model, input: count })).output_text, counted);
    },
    async stream() {
      const chunks = await create({ stream: true });
      await checkPieces(mapped(chunks, (chunk) => chunk.choices[0]?.delta.content));
      const events = await client.responses.create({ model, input: count, stream: true });
      const isText = (event) => event.type === "response.output_text.delta";
      await checkPieces(mapped(events, (event) => isText(event) && event.delta));
    },
    async tools() {
      const tools = [{ type: "function", function: { name: "take", parameters } }];
      const answer = await create({ messages: callMessages, tools });
      const [call] = answer.choices[0].message.tool_calls;
      check([call.function.name, JSON.parse(call.function.arguments)], ["take", { x: 1 }]);
    },
    async schema() {
      const format = { type: "json_schema", json_schema: { name: "answer", schema } };
      const answer = await client.chat.completions.parse({
        model,
        messages,
        response_format: format,
      });
      checkAnswer(JSON.parse(answer.choices[0].message.content));
    },
    async embeddings() {
      const embedder = new OpenAI({ baseURL: embeddingV1, apiKey: key, maxRetries: 0 });
      const reply = await embedder.embeddings.create({ model, input: ["one", "two"] });
      checkVectors(reply.data.map((one) => one.embedding));
    },
  };
}

async function anthropic() {
  const { Anthropic } = await load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  const fields = { model, messages, max_tokens: 200 };
  return {
    async text() {
      check((await client.messages.create(fields)).content[0].text, counted);
    },
    async stream() {
      const stream = client.messages.stream(fields);
      const isText = (event) => event.delta?.type === "text_delta";
      await checkPieces(mapped(stream, (event) => isText(event) && event.delta.text));
      check((await stream.finalMessage()).stop_reason, "end_turn");
    },
    async tools() {
      const tools = [{ name: "take", input_schema: parameters }];
      const asked = { ...fields, messages: callMessages, tools };
      const [call] = (await client.messages.create(asked)).content;
      check([call.name, call.input], ["take", { x: 1 }]);
      const [streamed] = (await client.messages.stream(asked).finalMessage()).content;
      check([streamed.name, streamed.input], ["take", { x: 1 }]);
    },
    async schema() {
      const format = { type: "json_schema", schema };
      const asked = { ...fields, output_config: { format } };
      checkAnswer(JSON.parse((await client.messages.create(asked)).content[0].text));
    },
  };
}

async function vercel(provide, embed) {
  const ai = await load("ai");
  const asked = { model: (await provide(v1))(model), maxRetries: 0 };
  const cells = {
    async text() {
      check((await ai.generateText({ ...asked, prompt: count })).text, counted);
    },
    async stream() {
      await checkPieces(ai.streamText({ ...asked, prompt: count }).textStream);
    },
    async tools() {
      const take = ai.tool({
        description: "Takes a number.",
        inputSchema: ai.jsonSchema(parameters),
        execute: async ({ x }) => `took ${x}`,
      });
      const { toolResults } = await ai.generateText({ ...asked, prompt: repeat, tools: { take } });
      check([toolResults[0].toolName, toolResults[0].output], ["take", "took 1"]);
    },
    async schema() {
      const output = ai.Output.object({ schema: ai.jsonSchema(schema) });
      const answer = await ai.generateText({ ...asked, prompt: count, output });
      checkAnswer(answer.output);
    },
  };
  if (embed) {
    cells.embeddings = async () => {
      const values = ["one", "two"];
      const embedder = embed(await provide(embeddingV1));
      const found = await ai.embedMany({ model: embedder, values, maxRetries: 0 });
      checkVectors(found.embeddings);
    };
  }
  return cells;
}

async function vercelOpenai(baseURL) {
  return (await load("@ai-sdk/openai")).createOpenAI({ baseURL, apiKey: key });
}

async function vercelCompatible(baseURL) {
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const fields = { name: "penstock", supportsStructuredOutputs: true };
  return createOpenAICompatible({ baseURL, apiKey: key, ...fields });
}

async function vercelAnthropic(baseURL) {
  return (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL, apiKey: key });
}

const clients = {
  openai,
  "@anthropic-ai/sdk": anthropic,
  "@ai-sdk/openai": () => vercel(vercelOpenai, (provided) => provided.embedding(model)),
  "@ai-sdk/openai-compatible": () =>
    vercel(vercelCompatible, (provided) => provided.textEmbeddingModel(model)),
  "@ai-sdk/anthropic": () => vercel(vercelAnthropic),
};

const cells = await clients[name]();
const description = readFileSync(`${process.env.CLIENTS_NODE}/node_modules/${name}/package.json`);
const row = { version: JSON.parse(description).version };
for (const [cell, run] of Object.entries(cells)) {
  try {
    await run();
    row[cell] = "yes";
  } catch (error) {
    console.error(error);
    row[cell] = String(error);
  }
}
console.log(JSON.stringify(row));
