// What becomes of sessions when their engine gets another device, on engines that only count.

import assert from "node:assert/strict";
import { test } from "node:test";
import { CedraError } from "../dist/errors.js";
import { Host } from "../dist/host.js";
import { Session } from "../dist/session.js";

const lost = () => Object.assign(new Error("lost"), { code: "DEVICE_LOST", data: { reason: "unknown", message: "gone", adapter: "a" } });

/** Engines whose device can be lost: `engines` are those that were loaded, `failing` is what the next load or reading throws. */
function setUp() {
  const engines = [];
  const saved = new Map();
  const log = [];
  let failing;
  const fail = (what) => {
    if (failing?.what !== what) return;
    const { error } = failing;
    failing = undefined;
    throw error;
  };
  class Counting {
    tokens = Uint32Array.of();
    closed = false;
    reused = 0;
    replayed = 0;
    layerRows = [];
    constructor(engine, tokens = []) {
      this.engine = engine;
      this.tokens = Uint32Array.from(tokens);
    }
    get length() {
      return this.tokens.length;
    }
    get remaining() {
      return 100 - this.length;
    }
    async append(ids, { onProgress, prefill, reuse }) {
      await this.engine.pause;
      this.engine.check();
      fail("append");
      log.push({ append: [...ids], prefill, reuse });
      onProgress(ids.length, ids.length);
      this.tokens = Uint32Array.of(...this.tokens, ...ids);
      return { reused: 0, replayed: 0 };
    }
    async generate() {
      this.engine.check();
      return {
        next: async () => {
          this.engine.check();
          this.tokens = Uint32Array.of(...this.tokens, 7);
          return { ids: Uint32Array.of(7), text: "7", done: false };
        },
        return: async () => this.engine.check(),
      };
    }
    async truncate(length, replay) {
      log.push({ truncate: length, replay });
      this.tokens = this.tokens.slice(0, length);
    }
    async save(store, name) {
      saved.set(name, [...this.tokens]);
      return { records: 1, bytes: 1 };
    }
    close() {
      this.closed = true;
    }
  }
  const load = async (_, { onProgress }) => {
    fail("load");
    onProgress(1, 1);
    const engine = {
      number: engines.length,
      gone: false,
      freed: false,
      sessions: [],
      attached: 0,
      info: { adapter: engines.length },
      check: () => {
        if (engine.gone) throw lost();
      },
      encode: (text) => Uint32Array.from(text, Number),
      session: async () => (engine.check(), engine.adopt(new Counting(engine))),
      adopt: (session) => (engine.sessions.push(session), session),
      open: async (store, name) => {
        fail("open");
        if (!saved.has(name)) throw Object.assign(new Error("none"), { code: "NO_SESSION" });
        return engine.adopt(new Counting(engine, saved.get(name)));
      },
      attach: async () => void engine.attached++,
      free: () => (engine.freed = true),
    };
    engines.push(engine);
    return engine;
  };
  const module = { version: () => "1", WasmEngine: { load }, WasmStore: { memory: () => ({}) } };
  const host = new Host(async () => module);
  return {
    host,
    engines,
    saved,
    log,
    failNext: (what, error) => (failing = { what, error }),
    start: () => host.call("load", { source: { files: new Map([["config.json", new Blob(["{}"])]]) }, cache: true }),
    open: async (args = {}) => new Session(host, await host.call("open", args)),
  };
}
const store = { kind: "memory", name: "m" };
const code = (call) => call.then(() => assert.fail("not refused"), (thrown) => (assert.ok(thrown instanceof CedraError), thrown.code));

test("a session comes back from its store as far as that has it, the rest is read as it was", async () => {
  const { host, engines, log, start, open } = setUp();
  await start();
  await host.call("attach", { store });
  const plain = await open();
  const exact = await open({ name: "exact", store });
  const cut = await open({ name: "cut", store });
  await plain.append([1, 2]);
  await exact.append([1, 2, 3], { prefill: "exact" });
  await exact.save();
  await exact.append([4]);
  await cut.append([5, 6, 7]);
  await cut.save();
  await cut.truncate(1);
  engines[0].gone = true;
  log.length = 0;
  const stages = [];
  const { sessions, info } = await host.call("recover", {}, { onProgress: (progress) => stages.push(progress) });
  assert.deepEqual(sessions, [
    { tokens: 2, reread: 2 },
    { name: "exact", tokens: 4, reread: 1 },
    { name: "cut", tokens: 1, reread: 0 },
  ]);
  assert.deepEqual(info, { adapter: 1 });
  assert.deepEqual(log, [
    { append: [1, 2], prefill: "bounded", reuse: true },
    { append: [4], prefill: "exact", reuse: false },
    { truncate: 1, replay: "bounded" },
  ]);
  assert.deepEqual(stages, [
    { stage: "load", loaded: 1, total: 1 },
    { stage: "read", done: 2, total: 2 },
    { stage: "read", name: "exact", done: 1, total: 1 },
  ]);
  assert.ok(engines[0].freed && engines[0].sessions.every(({ closed }) => closed) && engines[1].attached === 1);
  await plain.append([3]);
  assert.deepEqual([plain.length, (await plain.tokens())[2]], [3, 3]);
  // The name is still this session's.
  assert.equal(await code(open({ name: "exact", store })), "SESSION_BUSY");
});

test("what cannot be read in its store is read again from its tokens", async () => {
  const { host, engines, failNext, start, open } = setUp();
  await start();
  const session = await open({ name: "a", store });
  await session.append([1, 2, 3]);
  await session.save();
  engines[0].gone = true;
  failNext("open", Object.assign(new Error("damaged"), { code: "SESSION_DAMAGED" }));
  const { sessions } = await host.call("recover", {});
  assert.deepEqual(sessions, [{ name: "a", tokens: 3, reread: 3 }]);
});

test("a recovery that fails leaves everything as it was, and may be tried again", async () => {
  const { host, engines, failNext, start, open } = setUp();
  await start();
  const session = await open();
  await session.append([1, 2]);
  engines[0].gone = true;
  failNext("load", Object.assign(new Error("none"), { code: "NO_GPU" }));
  assert.equal(await code(host.call("recover", {})), "NO_GPU");
  failNext("append", Object.assign(new Error("stopped"), { code: "ABORTED" }));
  assert.equal(await code(host.call("recover", {})), "ABORTED");
  assert.ok(engines[1].freed && engines[1].sessions[0].closed && !engines[0].freed);
  assert.equal(await code(session.append([3])), "DEVICE_LOST");
  assert.deepEqual([...(await session.tokens())], [1, 2]);
  assert.deepEqual((await host.call("recover", {})).sessions, [{ tokens: 2, reread: 2 }]);
  assert.deepEqual([...(await session.tokens())], [1, 2]);
});

test("a second recovery waits for the first and finds nothing to do; so does one of a sound engine", async () => {
  const { host, engines, start, open } = setUp();
  await start();
  const session = await open();
  await session.append([1]);
  assert.deepEqual((await host.call("recover", {})).sessions, []);
  engines[0].gone = true;
  const [first, second] = await Promise.all([host.call("recover", {}), host.call("recover", {})]);
  assert.deepEqual([first.sessions.length, second.sessions.length, engines.length], [1, 0, 2]);
});

test("a recovery waits for what is pending, and an answer of before has ended", async () => {
  const { host, engines, start, open } = setUp();
  await start();
  const [a, b] = [await open(), await open()];
  await a.append([1]);
  const answer = a.generate();
  await answer.next();
  let go;
  engines[0].pause = new Promise((done) => (go = done));
  const reading = code(b.append([5]));
  engines[0].gone = true;
  const recovery = host.call("recover", {});
  setTimeout(go, 5);
  assert.equal(await reading, "DEVICE_LOST");
  assert.deepEqual((await recovery).sessions, [{ tokens: 2, reread: 2 }, { tokens: 0, reread: 0 }]);
  assert.equal(await code(answer.next()), "SESSION_BUSY");
  await a.append([8]);
  assert.deepEqual([...(await a.tokens())], [1, 7, 8]);
});

test("sessions that are closed and engines that are closed meanwhile stay so", async () => {
  const { host, engines, start, open } = setUp();
  await start();
  const [a, b] = [await open(), await open()];
  await a.append([1]);
  await b.append([2]);
  engines[0].gone = true;
  const recovery = host.call("recover", {});
  await a.close();
  assert.deepEqual((await recovery).sessions.length, 1);
  engines[1].gone = true;
  const again = host.call("recover", {});
  host.close();
  assert.equal(await code(again), "ENGINE_CLOSED");
});
