// The official `openai` client for Node.js. Usage: node openai_calls.cjs URL, with NODE_PATH where npm put the client.
// Prints what calls.py does: one line a call. CommonJS, since import does not look at NODE_PATH.
"use strict";
const diagnostics = require("node:diagnostics_channel");
const { OpenAI } = require("openai");

const URL = process.argv[2];
const QUESTION = "What is the capital of France?";
const STORY = "Tell me a short story about a fox.";
const CODE = "def fibonacci(n):\n";
const FORECAST = 'Say: <tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "unit": "c"}}\n</tool_call>';
const WEATHER = {
  type: "object",
  properties: { city: { type: "string" }, unit: { type: "string", enum: ["c", "f"] } },
  required: ["city", "unit"],
};
const LONG = 1000; // tokens: nobody waits for them
const LEAVE_AFTER = 300; // ms after a long stream's start
const TOO_SOON = 2; // ms in which no server has replied
const SETTLE = 800; // ms after which a server, behind a proxy too, has given up what nobody waits for
const SAME_START = 4; // characters of a stream that was left; how many came is chance
const ONE_CONNECTION = 40; // requests one after the other
const AT_ONCE = 8; // requests in parallel

let connections = 0; // that Node's fetch has made
diagnostics.subscribe("undici:client:connected", () => connections++);

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const chat = { model: "m", temperature: 0, max_tokens: 12, messages: [{ role: "user", content: QUESTION }] };
const completion = { model: "m", temperature: 0, max_tokens: 12, prompt: CODE };
const response = { model: "m", temperature: 0, max_output_tokens: 12, input: QUESTION };
const usage = { stream_options: { include_usage: true } };
const two = { n: 2, temperature: 0.8, seed: 7, max_tokens: 8 };
const longStory = { messages: [{ role: "user", content: STORY }], max_tokens: LONG, ignore_eos: true };

const settle = () => new Promise((done) => setTimeout(done, SETTLE));

async function whole(promise) {
  const { data, response } = await promise.withResponse();
  return { status: response.status, headers: [...response.headers], reply: data };
}

async function streamed(promise) {
  const { data, response } = await promise.withResponse();
  const events = [];
  for await (const event of data) events.push(event);
  return { status: response.status, headers: [...response.headers], events };
}

async function raised(promise) {
  try {
    return { raised: null, came: await promise };
  } catch (error) {
    const { status, error: body, code, type, param, message } = error;
    const headers = error.headers ? [...error.headers] : null;
    return { raised: error.constructor.name, message, status, body, code, type, param, headers };
  }
}

async function both(resource, fields) {
  return [await whole(resource.create(fields)), await streamed(resource.create({ ...fields, stream: true }))];
}

const completions = client.chat.completions;

const calls = {
  models: async () => [(await client.models.list()).data, await raised(client.models.retrieve("m"))],
  chat_plain: () => both(completions, chat),
  chat_usage: () => streamed(completions.create({ ...chat, ...usage, stream: true })),
  chat_two_choices: () => both(completions, { ...chat, ...two }),
  chat_stop: () => both(completions, { ...chat, stop: ["Fra", "\n\n"] }),
  chat_tool: () =>
    both(completions, {
      ...chat,
      messages: [{ role: "user", content: FORECAST }],
      tools: [{ type: "function", function: { name: "weather", parameters: WEATHER } }],
      tool_choice: { type: "function", function: { name: "weather" } },
      max_tokens: 60,
    }),
  chat_logprobs: () => both(completions, { ...chat, logprobs: true, top_logprobs: 2 }),
  stream_helper: () => completions.stream({ ...chat, ...usage }).finalChatCompletion(),
  completion_plain: () => both(client.completions, completion),
  completion_two_choices: () => both(client.completions, { ...completion, ...two }),
  response_plain: () => both(client.responses, response),
  wrong_value: async () => [
    await raised(completions.create({ ...chat, temperature: -1 })),
    await raised(completions.create({ ...chat, temperature: -1, stream: true })),
    await raised(client.responses.create({ ...response, temperature: -1 })),
  ],
  not_there: async () => [
    await raised(completions.create({ ...chat, model: "nope" })),
    await raised(client.get("/nothing")),
  ],
  no_reply_in_time: async () => {
    const error = await raised(completions.create({ ...chat, ...longStory }, { timeout: TOO_SOON, maxRetries: 1 }));
    await settle();
    return [error, ...(await both(completions, chat))];
  },
  left_in_the_middle: async () => {
    let text = "";
    for await (const event of await completions.create({ ...chat, ...longStory, stream: true })) {
      text += event.choices[0].delta.content ?? "";
      if (text.length >= SAME_START) break;
    }
    await settle();
    return [text.slice(0, SAME_START), ...(await both(completions, chat))];
  },
  aborted_in_the_middle: async () => {
    const abort = new AbortController();
    let [text, timer, ended] = ["", null, "by itself"];
    const options = { signal: abort.signal };
    try {
      for await (const event of await completions.create({ ...chat, ...longStory, stream: true }, options)) {
        text += event.choices[0].delta.content ?? "";
        timer ??= text.length >= SAME_START ? setTimeout(() => abort.abort(), LEAVE_AFTER) : null;
      }
    } catch (error) {
      ended = error.constructor.name;
    }
    await settle();
    return [abort.signal.aborted, ended, text.slice(0, SAME_START), ...(await both(completions, chat))];
  },
  one_after_the_other: async () => {
    await completions.create({ ...chat, max_tokens: 2 }); // whichever connections there are from before
    const before = connections;
    const replies = [];
    for (let number = 0; number < ONE_CONNECTION; number++)
      replies.push(await completions.create({ ...chat, max_tokens: 2 }));
    return { connections: 1 + connections - before, replies };
  },
  in_parallel: async () => {
    // What is sampled in parallel depends on how the engine batches; how much does not.
    const one = async () => {
      const reply = await completions.create({ ...chat, ignore_eos: true });
      return [reply.choices[0].finish_reason, reply.usage];
    };
    return Promise.all(Array.from({ length: AT_ONCE }, one));
  },
};

(async () => {
  for (const [call, make] of Object.entries(calls)) console.log(JSON.stringify({ call, saw: await make() }));
})();
