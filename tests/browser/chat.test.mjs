// Chats with the pocket model.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { start } from "./harness.mjs";

const facts = "The port of heron is 6077.\n\nThe owner of `zorbel` is Ada.\n\nconst GRID_SIZE: usize = 512;";
const port = "The port of heron is 6077.";
const size = "The value of GRID_SIZE is 512.";
let browser, page;

before(async () => {
  browser = await start();
  page = await browser.page();
  await page.evaluate(async (facts) => {
    // Row by row takes the fewest pipelines, and every row's bits are the same.
    globalThis.engine = await Engine.load("/pocket/", { context: 256, chunk: 1 });
    globalThis.chat = engine.chat.completions;
    globalThis.asked = [{ role: "user", content: `${facts}\n\nWhat is the port of heron?` }];
    globalThis.greedy = { temperature: 0, max_tokens: 24 };
  }, facts);
});
after(() => browser.close());

test("a reply, and one to what follows, which reads the rest only", async () => {
  const [first, second, ids] = await page.evaluate(async () => {
    const first = await chat.create({ messages: asked, model: "pocket", ...greedy });
    const more = [...asked, first.choices[0].message, { role: "user", content: "Who owns `zorbel`?" }];
    const second = await chat.create({ messages: more, ...greedy });
    // The same layout, written out.
    const text = `<｜begin▁of▁sentence｜><｜User｜>${asked[0].content}<｜Assistant｜></think>`;
    return [first, second, (await engine.encode(text, true)).length];
  });
  assert.deepEqual(first.choices, [{ index: 0, message: { role: "assistant", content: port }, finish_reason: "stop" }]);
  assert.deepEqual([first.object, first.model], ["chat.completion", "pocket"]);
  const { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details } = first.usage;
  assert.deepEqual([prompt_tokens, total_tokens, prompt_tokens_details.cached_tokens], [ids, ids + completion_tokens, 0]);
  // The end token too was made and is in the text, and the last of it waits for a step.
  assert.equal(second.usage.prompt_tokens_details.cached_tokens, total_tokens);
});

test("chunks say what a whole reply says; a loop can be left", async () => {
  const [chunks, one, whole] = await page.evaluate(async () => {
    const request = { messages: asked, ...greedy };
    const chunks = [];
    for await (const chunk of await chat.create({ ...request, stream: true, stream_options: { include_usage: true } })) chunks.push(chunk);
    let one = 0;
    for await (const { choices } of await chat.create({ ...request, stream: true })) if (choices[0].delta.content) { one++; break; }
    return [chunks, one, await chat.create(request)];
  });
  assert.equal(chunks.map(({ choices }) => choices[0]?.delta.content ?? "").join(""), port);
  assert.deepEqual(chunks.map(({ choices }) => choices[0]?.finish_reason).filter(Boolean), ["stop"]);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
  assert.deepEqual([one, whole.choices[0].message.content], [1, port]);
});

test("two at once answer as one does", async () => {
  const replies = await page.evaluate(() => {
    const other = [{ role: "user", content: asked[0].content.replace("What is the port of heron?", "What is the value of GRID_SIZE?") }];
    return Promise.all([asked, other].map((messages) => chat.create({ messages, ...greedy })));
  });
  assert.deepEqual(replies.map(({ choices }) => choices[0].message.content), [port, size]);
});

test("a stop text, a length, reasoning, a seed", async () => {
  const [stopped, cut, thought, drawn] = await page.evaluate(async () => {
    const ask = async (rest) => (await chat.create({ messages: asked, ...greedy, ...rest })).choices[0];
    const draw = () => ask({ temperature: 1.5, seed: 7, max_tokens: 6 });
    return [await ask({ stop: "77" }), await ask({ max_tokens: 1 }), await ask({ thinking: { type: "enabled" }, max_tokens: 3 }), [await draw(), await draw()]];
  });
  assert.deepEqual([stopped.finish_reason, stopped.message.content], ["stop", "The port of heron is 60"]);
  assert.equal(cut.finish_reason, "length");
  assert.ok(port.startsWith(cut.message.content) && cut.message.content.length < 8, JSON.stringify(cut));
  assert.ok(thought.message.content === "" && thought.message.reasoning_content.length > 0, JSON.stringify(thought));
  assert.deepEqual(drawn[0], drawn[1]);
});

test("a signal ends a reply; the conversation goes on", async () => {
  const [error, early, reply] = await page.evaluate(async () => {
    const abort = new AbortController();
    const request = { messages: asked, temperature: 0, stream: true };
    const left = refusal((async () => {
      for await (const { choices } of await chat.create(request, { signal: abort.signal })) if (choices[0].delta.content) abort.abort("enough");
    })());
    return [await left, await refusal(chat.create({ messages: asked }, { signal: AbortSignal.abort("no") })), await chat.create({ messages: asked, ...greedy })];
  });
  assert.deepEqual([error.code, error.cause, early.code, early.cause], ["ABORTED", "enough", "ABORTED", "no"]);
  assert.equal(reply.choices[0].message.content, port);
});

test("wrong requests are refused by field, wherever it is looked at", async () => {
  const errors = await page.evaluate(() =>
    Promise.all([
      refusal(chat.create({ messages: asked, temperature: -1 })),
      refusal(chat.create({ messages: [{ role: "developer", content: "x" }] })),
      refusal(chat.create({ messages: [...asked, { role: "tool", tool_call_id: "a", content: "x" }] })),
      refusal(chat.create({ messages: [{ role: "user", content: "a ".repeat(400) }] })),
    ]),
  );
  assert.deepEqual(errors.map(({ name, code, data }) => [name, code, data.field, data.allowed]).slice(0, 3), [
    ["CedraError", "ARGUMENT", "temperature", "a number, 0 or more"],
    ["CedraError", "ARGUMENT", "messages[0].role", '"system", "user", "assistant" or "tool"'],
    ["CedraError", "ARGUMENT", "messages[1].tool_call_id", "a tool message behind an assistant message with tool_calls"],
  ]);
  assert.deepEqual([errors[3].code, errors[3].data.allowed], ["CONTEXT", 256]);
});

test("sessions that are kept are two, whatever is asked", async () => {
  const [before, after] = await page.evaluate(async () => {
    const bytes = async () => (await engine.counters()).allocated.cache;
    const ask = (text) => chat.create({ messages: [{ role: "user", content: text }], temperature: 0, max_tokens: 1 });
    for (const text of ["a", "b"]) await ask(text);
    const before = await bytes();
    for (const text of ["c", "d", "e"]) await ask(text);
    return [before, await bytes()];
  });
  assert.equal(after, before);
});
