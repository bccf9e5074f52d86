// One writer a session, whatever becomes of it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { start } from "./harness.mjs";

let browser;
before(async () => (browser = await start()));
after(() => browser.close());

const lock = (page, name) =>
  page.evaluate(async (name) => {
    const { lockSession } = await import("/pkg/dist/locks.js");
    try {
      globalThis.unlock = await lockSession("indexedDB/cedra", name);
      return "taken";
    } catch ({ code, data }) {
      return { code, data };
    }
  }, name);

test("the second tab is refused, until the first gives the lock back or dies", async () => {
  const [a, b] = [await browser.page(), await browser.page()];
  assert.equal(await lock(a, "notes"), "taken");
  assert.deepEqual(await lock(b, "notes"), { code: "SESSION_BUSY", data: { session: "notes", store: "indexedDB/cedra" } });
  assert.equal((await lock(a, "notes")).code, "SESSION_BUSY");
  assert.equal(await lock(b, "others"), "taken");
  await a.evaluate(() => globalThis.unlock());
  assert.equal(await lock(b, "notes"), "taken");
  await b.close();
  assert.equal(await lock(a, "notes"), "taken");
  // A reload right after: the page that goes does not stand in the way of the one that comes.
  await browser.reload(a);
  assert.equal(await lock(a, "notes"), "taken");
  await a.close();
});

test("a lock held by a worker goes with the worker", async () => {
  const page = await browser.page();
  const outcome = await page.evaluate(async () => {
    const { lockSession } = await import("/pkg/dist/locks.js");
    const source = `import { lockSession } from "${location.origin}/pkg/dist/locks.js";
      await lockSession("memory/x", "a"); postMessage("held");`;
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })), { type: "module" });
    await new Promise((held) => (worker.onmessage = held));
    const refused = await lockSession("memory/x", "a").catch(({ code }) => code);
    worker.terminate();
    await lockSession("memory/x", "a");
    return refused;
  });
  assert.equal(outcome, "SESSION_BUSY");
  await page.close();
});

test("what this browser has is told", async () => {
  const page = await browser.page();
  const found = await page.evaluate(() => isSupported());
  assert.deepEqual([found.supported, found.missing, found.degraded], [true, [], []]);
  assert.ok(found.limits.maxStorageBufferBindingSize >= 128 << 20);
  const without = await page.evaluate(() => {
    Object.defineProperty(navigator, "gpu", { value: undefined });
    IDBFactory.prototype.open = () => { throw new DOMException("denied", "SecurityError"); };
    return isSupported();
  });
  assert.equal(without.supported, false);
  assert.deepEqual(without.missing, ["WebGPU"]);
  assert.match(without.degraded.join(), /IndexedDB/);
  await page.close();
});
