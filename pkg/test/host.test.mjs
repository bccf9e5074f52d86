// The host's own decisions, on a model that counts: the next token is one more than the last. What a real model does is tested in a
// browser.

import assert from "node:assert/strict";
import { test } from "node:test";
import { CedraError } from "../dist/errors.js";
import { Host } from "../dist/host.js";
import { Session } from "../dist/session.js";

const turn = () => new Promise((done) => setTimeout(done, 1));

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
    return 100 - this.tokens.length;
  }
  async append(ids, { onProgress, signal }) {
    for (const [i, id] of [...ids].entries()) {
      await turn();
      if (signal?.aborted) throw Object.assign(new Error("stopped"), { code: "ABORTED", data: { read: i, of: ids.length } });
      this.tokens.push(id);
      onProgress(i + 1, ids.length);
    }
    return { reused: 0, replayed: 0 };
  }
  async generate({ maxTokens = 5, signal }) {
    const generation = {
      left: 0,
      next: async () => {
        await turn();
        if (signal.aborted) throw Object.assign(new Error("stopped"), { code: "ABORTED" });
        if (maxTokens-- <= 0) return { ids: Uint32Array.of(), text: "", done: true, finish: "length" };
        const id = this.tokens.at(-1) + 1;
        this.tokens.push(id);
        return { ids: Uint32Array.of(id), text: `${id} `, done: false };
      },
      return: async () => void generation.left++,
    };
    this.generations.push(generation);
    return generation;
  }
  async truncate(length) {
    this.tokens.length = length;
  }
  async fork() {
    return Object.assign(new Counting(), { tokens: [...this.tokens] });
  }
  async save(store, name) {
    if (store.fails) throw store.fails;
    const tokens = [...this.tokens];
    await store.pause;
    store.saved.set(name, tokens);
    return { records: 1, bytes: tokens.length, tokens: tokens.length };
  }
  close() {
    this.closed = true;
  }
}

/** A host with its engine loaded, and ways to look inside. */
async function setUp(store = { saved: new Map() }) {
  const made = [];
  const adopt = (session) => (made.push(session), session);
  const engine = {
    info: {},
    counters: {},
    encode: (text) => Uint32Array.from(text, Number),
    check: () => {},
    session: async () => adopt(new Counting()),
    open: async (store, name) => {
      if (!store.saved.has(name)) throw Object.assign(new Error("none"), { code: "NO_SESSION" });
      return adopt(Object.assign(new Counting(), { tokens: [...store.saved.get(name)] }));
    },
    remove: async (store, name) => store.saved.delete(name),
    free: () => {},
  };
  const module = {
    version: () => "1.2.3",
    WasmEngine: { load: async () => engine },
    WasmStore: {
      memory: () => store,
      indexedDb: async () => {
        throw Object.assign(new Error("denied"), { code: "STORE", data: { store: "x" } });
      },
    },
  };
  const host = new Host(async () => module);
  await host.call("load", { source: { files: new Map([["config.json", new Blob(['{"bos_token_id":9}'])]]) }, cache: true });
  const open = async (args = {}) => new Session(host, await host.call("open", args));
  return { host, made, open, store };
}
const memory = { kind: "memory", name: "m" };
const refused = (call) => call.then(() => assert.fail("not refused"), (thrown) => (assert.ok(thrown instanceof CedraError), thrown));
const collect = async (answer) => {
  let text = "";
  for await (const piece of answer) text += piece.text;
  return text;
};

test("only the first text gets the first token", async () => {
  const { open } = await setUp();
  const session = await open();
  await session.append("12");
  await session.append("34");
  await session.append([5]);
  assert.deepEqual([...(await session.tokens())], [9, 1, 2, 3, 4, 5]);
});

test("an answer ends at a stop string, and its session lets go of it", async () => {
  const { open, made } = await setUp();
  const session = await open();
  await session.append([1]);
  const answer = session.generate({ maxTokens: 50, stop: "5 6" });
  assert.equal(await collect(answer), "2 3 4 ");
  assert.deepEqual([answer.finish, session.length], ["stop", 6]);
  assert.equal(made[0].generations[0].left, 1);
  assert.equal(await collect(session.generate({ maxTokens: 2, stop: ["8 9 10", "x"] })), "7 8 ");
  assert.equal((await refused(collect(session.generate({ stop: "" })))).code, "ARGUMENT");
});

test("leaving a loop ends the generation once; a finished one is not ended again", async () => {
  const { open, made } = await setUp();
  const session = await open();
  await session.append([1]);
  for await (const piece of session.generate()) if (piece.ids[0] === 3) break;
  assert.deepEqual([session.length, made[0].generations[0].left], [3, 1]);
  await collect(session.generate());
  assert.equal(made[0].generations[1].left, 0);
});

test("an idle answer gives way, a busy one does not", async () => {
  const { open, made } = await setUp();
  const session = await open();
  await session.append([1]);
  const first = session.generate();
  await first.next();
  await session.append([7]);
  assert.equal(made[0].generations[0].left, 1);
  assert.equal((await refused(first.next())).code, "SESSION_BUSY");
  const second = session.generate();
  const piece = second.next();
  await Promise.resolve();
  const others = [session.append([1]), session.truncate(1), session.fork(), session.generate().next()];
  for (const error of await Promise.all(others.map(refused))) assert.equal(error.code, "SESSION_BUSY");
  assert.deepEqual([...(await piece).value.ids], [8]);
  await second.return();
  await session.truncate(1);
  assert.equal(session.length, 1);
});

test("an abort ends reading and writing, the numbers follow, the session goes on", async () => {
  const { open, made } = await setUp();
  const session = await open();
  let abort = new AbortController();
  const onProgress = ({ done }) => done === 2 && abort.abort();
  const error = await refused(session.append([1, 2, 3, 4], { signal: abort.signal, onProgress }));
  assert.deepEqual([error.code, error.data], ["ABORTED", { read: 2, of: 4 }]);
  assert.equal(session.length, 2);
  abort = new AbortController();
  const answer = session.generate({ signal: abort.signal });
  await answer.next();
  const next = answer.next();
  abort.abort();
  assert.equal((await refused(next)).code, "ABORTED");
  assert.equal(made[0].generations[0].left, 1);
  assert.equal(session.length, 3);
  assert.equal(await collect(session.generate({ maxTokens: 1 })), "4 ");
});

test("persisted says whether the store has the text as it is", async () => {
  const { open, store } = await setUp();
  const session = await open({ name: "a", store: memory });
  await session.append([1, 2]);
  assert.equal(session.persisted, false);
  await session.save();
  assert.equal(session.persisted, true);
  await collect(session.generate({ maxTokens: 1 }));
  assert.equal(session.persisted, false);
  let go;
  store.pause = new Promise((done) => (go = done));
  const save = session.save();
  await turn();
  await session.append([5]);
  go();
  await save;
  assert.equal(session.persisted, false);
  await session.close();
  const again = await open({ name: "a", store: memory });
  assert.deepEqual([again.length, again.persisted], [3, true]);
});

test("a save runs beside an answer, and the next one after it", async () => {
  const { open, store, made } = await setUp();
  const session = await open({ name: "a", store: memory });
  await session.append([1]);
  const answer = session.generate({ maxTokens: 4 });
  await answer.next();
  let go;
  store.pause = new Promise((done) => (go = done));
  const saves = [session.save(), session.save()];
  const busy = answer.next();
  saves.push(session.save());
  await busy;
  await answer.next();
  assert.equal(store.saved.size, 0);
  go();
  const tokens = (await Promise.all(saves)).map(({ tokens }) => tokens);
  assert.equal(tokens[0], 2);
  assert.ok(tokens[1] >= 4 && tokens[2] >= tokens[1], `each has the text of its turn: ${tokens}`);
  assert.equal(session.persisted, tokens[2] === session.length);
  assert.equal(await collect(answer), "5 ");
  assert.deepEqual([made[0].generations[0].left, session.length, session.persisted], [0, 5, false]);
  assert.deepEqual([await session.save(), session.persisted], [{ records: 1, bytes: 5, tokens: 5 }, true]);
});

test("a store that refuses is told of until it takes a save; the answer goes on", async () => {
  const { open, store } = await setUp();
  const session = await open({ name: "a", store: memory });
  await session.append([1]);
  const answer = session.generate({ maxTokens: 2 });
  await answer.next();
  store.fails = Object.assign(new Error("full"), { code: "STORE_FULL", data: { needed: 5, available: 3 } });
  const error = await refused(session.save());
  assert.deepEqual([error.code, error.data], ["QUOTA", { needed: 5, available: 3 }]);
  assert.deepEqual([session.persisted, session.storeError.code], [false, "QUOTA"]);
  assert.equal(await collect(answer), "3 ");
  assert.equal(session.storeError.data.needed, 5);
  delete store.fails;
  await session.save();
  assert.deepEqual([session.persisted, session.storeError], [true, undefined]);
  store.fails = Object.assign(new Error("full"), { code: "STORE_FULL", data: {} });
  await refused(session.save());
  assert.deepEqual([session.persisted, session.storeError.code], [true, "QUOTA"], "the store still has the text as it is");
});

test("a name has one session at a time, whatever fails in between", async () => {
  const { open, host } = await setUp();
  const a = await open({ name: "a", store: memory });
  assert.equal((await refused(open({ name: "a", store: memory }))).code, "SESSION_BUSY");
  assert.equal((await refused(host.call("remove", { name: "a", store: memory }))).code, "SESSION_BUSY");
  const b = await open();
  assert.equal((await refused(b.save({ name: "a", store: memory }))).code, "SESSION_BUSY");
  await b.save({ name: "b", store: memory });
  assert.equal((await refused(open({ name: "b", store: memory }))).code, "SESSION_BUSY");
  await a.close();
  await b.save({ name: "a", store: memory });
  await (await open({ name: "b", store: memory })).close();
  await b.close();
  await b.close();
  assert.equal((await refused(b.append([1]))).code, "SESSION_CLOSED");
  await (await open({ name: "a", store: memory })).close();
});

test("a name is free only when what is being saved under it is saved", async () => {
  const { open, store } = await setUp();
  const session = await open({ name: "a", store: memory });
  await session.append([1]);
  let go;
  store.pause = new Promise((done) => (go = done));
  const save = session.save();
  await turn();
  const another = session.save();
  const close = session.close();
  assert.equal((await refused(session.append([1]))).code, "SESSION_CLOSED");
  await turn();
  assert.equal((await refused(open({ name: "a", store: memory }))).code, "SESSION_BUSY");
  go();
  await Promise.all([save, another, close]);
  await (await open({ name: "a", store: memory })).close();
});

test("without storage a session goes on in memory, and its save says why", async () => {
  const { open, store } = await setUp();
  const session = await open({ name: "a", store: { kind: "indexedDB", name: "x" } });
  assert.deepEqual([session.persisted, session.storeError.code, session.storeError.data], [false, "STORE", { store: "x" }]);
  await session.append([1]);
  assert.equal((await refused(session.save())).code, "STORE");
  await session.save({ name: "a", store: memory });
  assert.deepEqual([session.persisted, session.storeError], [true, undefined]);
  store.fails = Object.assign(new Error("full"), { code: "STORE_FULL", data: { available: 3 } });
  await session.append([2]);
  const error = await refused(session.save());
  assert.deepEqual([error.code, error.data.available, session.persisted], ["QUOTA", 3, false]);
});

test("a closed engine closes its sessions and refuses everything", async () => {
  const { open, host, made } = await setUp();
  const session = await open({ name: "a", store: memory });
  host.close();
  assert.ok(made[0].closed);
  assert.equal((await refused(session.append([1]))).code, "ENGINE_CLOSED");
  await session.close();
});
