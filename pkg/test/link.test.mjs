import assert from "node:assert/strict";
import { test } from "node:test";
import { CedraError } from "../dist/errors.js";
import { WorkerLink } from "../dist/link.js";
import { serve } from "../dist/worker.js";

/** A worker whose thread is this one: messages are cloned and come later, as they do in a real one. */
function pair(host) {
  const worker = new EventTarget();
  const scope = new EventTarget();
  const deliver = (to, data) => {
    const copy = structuredClone(data);
    setTimeout(() => worker.ended || to.dispatchEvent(Object.assign(new Event("message"), { data: copy })));
  };
  worker.postMessage = (data) => deliver(scope, data);
  scope.postMessage = (data) => deliver(worker, data);
  worker.terminate = () => (worker.ended = true);
  serve(scope, host);
  return { link: new WorkerLink(worker), worker, scope };
}

const until = (signal) => new Promise((_, reject) => signal.addEventListener("abort", () => reject(new CedraError("ABORTED", "stopped", { read: 3, of: 9 }))));

test("results and progress come back", async () => {
  const { link } = pair({
    call: async (method, args, { onProgress }) => {
      onProgress?.({ done: 1, total: 2 });
      return { method, args };
    },
  });
  const heard = [];
  const args = { session: 1, text: Uint32Array.of(7), special: false };
  const result = await link.call("append", args, { onProgress: (progress) => heard.push(progress) });
  assert.deepEqual(result, { method: "append", args });
  assert.deepEqual(heard, [{ done: 1, total: 2 }]);
  link.close();
});

test("errors keep code, data and cause", async () => {
  const { link } = pair({
    call: async () => {
      const cause = new CedraError("STORE", "the disk", { at: 3 }, new RangeError("deep"));
      throw new CedraError("QUOTA", "full", { needed: 10, available: 4, odd: () => {} }, cause);
    },
  });
  const error = await link.call("tokens", { session: 1 }).catch((thrown) => thrown);
  assert.ok(error instanceof CedraError);
  assert.equal(typeof error.data.odd, "string");
  assert.deepEqual([error.code, error.message, error.data.needed], ["QUOTA", "full", 10]);
  assert.ok(error.cause instanceof CedraError);
  assert.deepEqual([error.cause.code, error.cause.data], ["STORE", { at: 3 }]);
  assert.deepEqual([error.cause.cause.name, error.cause.cause.message], ["RangeError", "deep"]);
  link.close();
});

test("an aborted call ends with the caller's reason, and the others go on", async () => {
  const { link } = pair({ call: async (method, _, { signal }) => (method === "append" ? until(signal) : "decoded") });
  const abort = new AbortController();
  const append = link.call("append", { session: 1, text: "a", special: false }, { signal: abort.signal });
  const decode = link.call("decode", { ids: Uint32Array.of(1) });
  abort.abort("enough");
  const error = await append.catch((thrown) => thrown);
  assert.deepEqual([error.code, error.data, error.cause], ["ABORTED", { read: 3, of: 9 }, "enough"]);
  assert.equal(await decode, "decoded");
  const late = await link.call("tokens", { session: 1 }, { signal: abort.signal }).catch((thrown) => thrown);
  assert.equal(late.code, "ABORTED");
  link.close();
});

test("whatever ends the worker rejects what waits, and what comes later", async () => {
  const never = { call: () => new Promise(() => {}) };
  const ends = {
    WORKER: ({ worker }) => worker.dispatchEvent(Object.assign(new Event("error"), { message: "404" })),
    INTERNAL: ({ scope }) => scope.dispatchEvent(Object.assign(new Event("error"), { error: new WebAssembly.RuntimeError("unreachable") })),
    ENGINE_CLOSED: ({ link }) => link.close(),
  };
  for (const [code, end] of Object.entries(ends)) {
    const both = pair(never);
    const waiting = [both.link.call("tokens", { session: 1 }), both.link.call("encode", { text: "", special: false })];
    end(both);
    for (const call of [...waiting, both.link.call("tokens", { session: 1 })]) {
      assert.equal((await call.catch((thrown) => thrown)).code, code);
    }
    assert.ok(both.worker.ended);
  }
});

test("an argument that cannot be sent is an error of its own", async () => {
  const { link } = pair({ call: async () => "fine" });
  const error = await link.call("decode", { ids: () => {} }).catch((thrown) => thrown);
  assert.equal(error.code, "ARGUMENT");
  assert.equal(await link.call("decode", { ids: Uint32Array.of() }), "fine");
  link.close();
});
