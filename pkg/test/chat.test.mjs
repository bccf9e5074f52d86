// What a chat does with sessions, on a model that counts: the next token is one more than the last. Conversations are numbers, a
// reply begins behind 1000, and 500 begins a call.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Chat } from "../dist/chat.js";
import { checked } from "../dist/completion.js";
import { CedraError } from "../dist/errors.js";
import { Host } from "../dist/host.js";
import { choose, common, seedFor } from "../dist/kept.js";
import { Session } from "../dist/session.js";

const turn = () => new Promise((done) => setTimeout(done, 1));
const numbers = (text) => text.split(" ").filter(Boolean).map(Number);

class Counting {
  tokens = [];
  closed = false;
  reused = 0;
  replayed = 0;
  layerRows = [];
  generations = [];
  get length() {
    return this.tokens.length;
  }
  get remaining() {
    return 40 - this.tokens.length;
  }
  async append(ids, { signal }) {
    await turn();
    if (signal?.aborted) throw Object.assign(new Error("stopped"), { code: "ABORTED", data: {} });
    if (ids.length > this.remaining) throw Object.assign(new Error("full"), { code: "CONTEXT", data: {} });
    this.tokens.push(...ids);
    (this.read ??= []).push(ids.length);
    return { reused: 0, replayed: 0 };
  }
  async generate({ maxTokens, signal, ...options }) {
    this.generations.push(options);
    const end = this.tokens.length + maxTokens;
    return {
      next: async () => {
        await turn();
        if (signal.aborted) throw Object.assign(new Error("stopped"), { code: "ABORTED", data: {} });
        if (this.fails) throw Object.assign(new Error("lost"), { code: "DEVICE_LOST", data: {} });
        if (this.tokens.length === end) return { ids: Uint32Array.of(), text: "", done: true, finish: "length" };
        const id = this.tokens.at(-1) + 1;
        if (id % 10 === 9) return { ids: Uint32Array.of(), text: "", done: true, finish: "stop" };
        this.tokens.push(id);
        return { ids: Uint32Array.of(id), text: String(id), done: false };
      },
      return: async () => {},
    };
  }
  async truncate(length) {
    this.tokens.length = length;
    this.replayed += 2;
  }
  close() {
    this.closed = true;
  }
}

async function setUp() {
  const sessions = [];
  let replies = 0;
  const engine = {
    info: {},
    check: () => {},
    session: async () => (sessions.push(new Counting()), sessions.at(-1)),
    encodeChat: (conversation) =>
      Uint32Array.from([0, ...JSON.parse(conversation).messages.flatMap(({ role, content }) => (role === "user" ? numbers(content) : [1000, ...numbers(content)])), 1000]),
    reply: () => {
      replies++;
      return {
        push: (ids) => [...ids].map((id) => (id === 1005 ? { type: "call", index: 0, name: "f" } : { type: "content", text: `${id} ` })),
        finish: () => [],
        free: () => replies--,
      };
    },
    free: () => {},
  };
  const host = new Host(async () => ({ version: () => "", WasmEngine: { load: async () => engine } }));
  await host.call("load", { source: { files: new Map([["config.json", new Blob(["{}"])]]) }, cache: true });
  const { completions } = new Chat(host, async () => new Session(host, await host.call("open", {})));
  const ask = (content, rest) => completions.create({ messages: [...(rest?.before ?? []), { role: "user", content }], temperature: 0, max_tokens: 3, ...rest?.with });
  return { host, completions, ask, sessions, left: () => replies };
}
const user = (content) => ({ role: "user", content });
const refused = (call) => call.then(() => assert.fail("not refused"), (thrown) => (assert.ok(thrown instanceof CedraError), thrown));
const gather = async (stream) => {
  const all = [];
  for await (const chunk of await stream) all.push(chunk);
  return all;
};

test("a reply in OpenAI's shape", async () => {
  const { ask, left } = await setUp();
  const { id, created, ...reply } = await ask("5 6", { with: { model: "m" } });
  assert.match(id, /^chatcmpl-/);
  assert.ok(Math.abs(created - Date.now() / 1000) < 5);
  assert.deepEqual(reply, {
    object: "chat.completion",
    model: "m",
    choices: [{ index: 0, message: { role: "assistant", content: "1001 1002 1003 " }, finish_reason: "length" }],
    usage: { prompt_tokens: 4, completion_tokens: 3, total_tokens: 7, prompt_tokens_details: { cached_tokens: 0 } },
  });
  assert.equal(left(), 0);
});

test("what goes on from a conversation reads the rest only", async () => {
  const { ask, sessions } = await setUp();
  const first = await ask("5 6");
  const before = [user("5 6"), first.choices[0].message];
  const second = await ask("8 9", { before });
  assert.deepEqual(second.usage.prompt_tokens_details, { cached_tokens: 6 });
  assert.deepEqual([sessions.length, sessions[0].read], [1, [4, 3]]);
  // The same again: the reply of before goes, which costs what a cut computes again.
  const again = await ask("8 9", { before });
  assert.equal(again.choices[0].message.content, second.choices[0].message.content);
  assert.deepEqual([again.usage.prompt_tokens_details.cached_tokens, sessions.length, sessions[0].read], [7, 1, [4, 3]]);
});

test("another conversation gets a session of its own, and the oldest goes", async () => {
  const { ask, sessions } = await setUp();
  for (const text of ["11", "12", "13"]) await ask(text);
  assert.deepEqual(sessions.map(({ closed }) => closed), [true, false, false]);
  // The second was not touched by the third.
  await ask("12");
  await ask("14");
  assert.deepEqual(sessions.map(({ closed }) => closed), [true, false, true, false]);
});

test("requests at the same time have a session each", async () => {
  const { ask, sessions } = await setUp();
  const first = await ask("5 6");
  const before = [user("5 6"), first.choices[0].message];
  const replies = await Promise.all([ask("7", { before }), ask("7", { before })]);
  assert.deepEqual(replies.map(({ usage }) => usage.prompt_tokens_details.cached_tokens), [6, 0]);
  assert.deepEqual(replies.map(({ choices }) => choices[0].message.content), ["1001 1002 1003 ", "1001 1002 1003 "]);
  assert.equal(sessions.length, 2);
});

test("chunks, with usage if it is asked for", async () => {
  const { ask } = await setUp();
  const chunks = await gather(ask("5", { with: { stream: true, stream_options: { include_usage: true }, max_tokens: 1 } }));
  assert.equal(new Set(chunks.map(({ id }) => id)).size, 1);
  assert.deepEqual(
    chunks.map(({ object, choices, usage }) => [object, choices, usage]),
    [
      ["chat.completion.chunk", [{ index: 0, delta: { role: "assistant", content: "" }, finish_reason: null }], null],
      ["chat.completion.chunk", [{ index: 0, delta: { content: "1001 " }, finish_reason: null }], null],
      ["chat.completion.chunk", [{ index: 0, delta: {}, finish_reason: "length" }], null],
      ["chat.completion.chunk", [], { prompt_tokens: 3, completion_tokens: 1, total_tokens: 4, prompt_tokens_details: { cached_tokens: 0 } }],
    ],
  );
  assert.ok((await gather(ask("5", { with: { stream: true } }))).every((chunk) => !("usage" in chunk)));
});

test("the model's own end, a stop text, a call", async () => {
  const { ask, left } = await setUp();
  const finish = async (with_) => {
    const { choices } = await ask("5", { with: { max_tokens: 20, ...with_ } });
    return [choices[0].finish_reason, choices[0].message.content, choices[0].message.tool_calls?.map(({ function: { name } }) => name)];
  };
  assert.deepEqual(await finish({ stop: "1003" }), ["stop", "1001 1002 ", undefined]);
  assert.deepEqual(await finish({ stop: ["never", "2 1003"] }), ["stop", "1001 100", undefined]);
  // What is held back for a stop text shows when a call begins.
  assert.deepEqual(await finish({ stop: "1004 x" }), ["tool_calls", "1001 1002 1003 1004 1006 1007 1008 ", ["f"]]);
  assert.equal(left(), 0);
});

test("a loop that is left, a signal and an error end a reply, and its session goes on", async () => {
  const { ask, completions, sessions, left } = await setUp();
  for await (const { choices } of await ask("5", { with: { stream: true } })) if (choices[0].delta.content) break;
  assert.equal(left(), 0);
  const abort = new AbortController();
  const request = { messages: [user("5")], temperature: 0, max_tokens: 9, stream: true };
  const stopped = refused(
    (async () => {
      for await (const { choices } of await completions.create(request, { signal: abort.signal })) if (choices[0].delta.content) abort.abort("enough");
    })(),
  );
  assert.deepEqual([(await stopped).code, (await stopped).cause], ["ABORTED", "enough"]);
  sessions[0].fails = true;
  assert.equal((await refused(ask("5"))).code, "DEVICE_LOST");
  sessions[0].fails = false;
  assert.equal((await ask("5")).usage.prompt_tokens_details.cached_tokens, 2);
  assert.deepEqual([sessions.length, left()], [1, 0]);
});

test("a stream that nobody reads takes nothing", async () => {
  const { ask, sessions, left } = await setUp();
  await ask("5", { with: { stream: true } });
  await turn();
  assert.deepEqual([sessions.length, left()], [0, 0]);
});

test("replies end where the context does, and one without room is refused", async () => {
  const { ask } = await setUp();
  const text = (length) => Array(length).fill("1").join(" ");
  const { choices, usage } = await ask(text(35), { with: { max_tokens: null } });
  assert.deepEqual([choices[0].finish_reason, usage.total_tokens], ["length", 40]);
  const { code, data } = await refused(ask(text(38)));
  assert.deepEqual([code, data], ["CONTEXT", { needed: 41, allowed: 40 }]);
});

test("with a seed the same request draws the same; without, another", async () => {
  const { ask, sessions } = await setUp();
  const drawn = (seed) => ask("5", { with: { seed, temperature: 1, top_p: 0.5 } });
  for (const seed of [7, 7, undefined, undefined]) await drawn(seed);
  const options = sessions.flatMap(({ generations }) => generations);
  assert.ok(options.every(({ temperature, topP }) => temperature === 1 && topP === 0.5));
  const seeds = options.map(({ seed }) => seed);
  assert.equal(seeds.filter((seed) => seed === seedFor(7n, 3)).length, 2);
  assert.equal(new Set(seeds).size, 3);
  // A session whose seed stayed the same would draw on.
  assert.ok(sessions.every(({ generations }) => new Set(generations.map(({ seed }) => seed)).size === generations.length));
});

test("the session that a text continues", () => {
  const kept = (tokens, prompt, seed) => ({ tokens: Uint32Array.from(tokens), prompt, seed });
  assert.equal(common([1, 2, 3], [1, 2, 4]), 2);
  assert.equal(common([], [1]), 0);
  const of = (list, text, seed) => {
    const found = choose(list, text, seed);
    return found && [list.indexOf(found.chosen), found.shared];
  };
  const list = [kept([1, 2, 3, 9, 9], 3), kept([1, 2, 3, 4, 5, 9], 5), kept([7], 4)];
  assert.deepEqual(of(list, [1, 2, 3, 4, 5, 9, 6]), [1, 6]);
  assert.deepEqual(of(list, [1, 2, 3, 8]), [0, 3]);
  // All but the token that began the reply.
  assert.deepEqual(of(list, [1, 2, 8]), [0, 2]);
  assert.equal(of(list, [1, 8]), undefined);
  // A reading that was stopped early.
  assert.deepEqual(of(list, [7, 8]), [2, 1]);
  assert.equal(of([kept([], 4)], [7]), undefined);
  const seeded = [kept([1, 2, 3], 2, 5n)];
  assert.deepEqual([of(seeded, [1, 2], 5n), of(seeded, [1, 2], 6n), of(seeded, [1, 2])], [undefined, [0, 2], [0, 2]]);
  assert.notEqual(seedFor(1n, 5), seedFor(1n, 6));
  assert.ok(seedFor((1n << 64n) - 1n, 1e6) < 1n << 64n);
});

test("wrong requests are refused by field", () => {
  const messages = [user("x")];
  for (const [request, field, found, allowed] of [
    [null, "request", "null", "an object"],
    [{ messages, n: 2 }, "n", "2", /^no such field; the fields are messages, /],
    [{ messages, temperature: -1 }, "temperature", "-1", "a number, 0 or more"],
    [{ messages, temperature: "hot" }, "temperature", '"hot"', "a number, 0 or more"],
    [{ messages, top_p: 0 }, "top_p", "0", "more than 0, at most 1"],
    [{ messages, max_tokens: 0 }, "max_tokens", "0", "a whole number, 1 or more"],
    [{ messages, max_completion_tokens: 1.5 }, "max_completion_tokens", "1.5", "a whole number, 1 or more"],
    [{ messages, stop: ["a", ""] }, "stop", '["a",""]', "a text, or up to 4 of them, none of them empty"],
    [{ messages, stop: [..."abcde"] }, "stop", '["a","b","c","d","e"]', "a text, or up to 4 of them, none of them empty"],
    [{ messages, seed: -1 }, "seed", "-1", "a whole number from 0 to 2^64 - 1"],
    [{ messages, seed: 1n << 64n }, "seed", "18446744073709551616", "a whole number from 0 to 2^64 - 1"],
    [{ messages, stream: "yes" }, "stream", '"yes"', "true or false"],
    [{ messages, stream_options: { include_usage: true } }, "stream_options", '{"include_usage":true}', "nothing, without `stream: true`"],
    [{ messages, stream: true, stream_options: { include_usage: 1 } }, "stream_options.include_usage", "1", "true or false"],
    [{ messages, model: 5 }, "model", "5", "a string"],
  ]) {
    assert.throws(
      () => checked(request),
      (thrown) => {
        const { code, data, message } = thrown;
        assert.deepEqual([code, data.field, data.found], ["ARGUMENT", field, found]);
        if (typeof allowed === "string") assert.equal(data.allowed, allowed);
        else assert.match(data.allowed, allowed);
        assert.equal(message, `\`${field}\`: found ${found}, allowed: ${data.allowed}`);
        return true;
      },
    );
  }
  const circle = {};
  circle.circle = circle;
  assert.throws(() => checked({ messages: circle }), { code: "ARGUMENT" });
  const { temperature, topP, maxTokens, stop, seed, stream } = checked({ messages, max_tokens: 5, max_completion_tokens: null, stop: null, seed: 3 });
  assert.deepEqual([temperature, topP, maxTokens, stop, seed, stream], [1, 1, 5, [], 3n, false]);
});
