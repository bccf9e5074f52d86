// What takes many tokens: a long text that is left and found again, and memory that stays what it was. Sizes are small here;
// CEDRA_LONG_TOKENS=20000 and CEDRA_GENERATIONS=200 make them real.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { start } from "./harness.mjs";

const LENGTH = Number(process.env.CEDRA_LONG_TOKENS ?? 300);
const GENERATIONS = Number(process.env.CEDRA_GENERATIONS ?? 10);
const AFTER = 64;
/** The golden model has 4,096 positions; what is longer, the pocket model reads, many rows at a time. */
const LONG = LENGTH + AFTER > 4096;
/** Rows that a restore may compute again: the window, a group's remainder, the history of the n-grams. */
const BOUND = (LONG ? 64 : 16) + 1 + 3;

let browser, page;
before(async () => {
  browser = await start();
  page = await browser.page();
  page.setDefaultTimeout(0);
});
after(() => browser.close());

const text = Array.from({ length: LENGTH }, (_, i) => (i === 0 ? 0 : 3 + ((i * i * 11 + i * 13 + 5) % 300)));
const open = (context) =>
  page.evaluate(async ([context, long]) => {
    globalThis.engine ??= await (long ? Engine.load("/pocket/", { context }) : load({ context }));
    globalThis.session = await engine.session("long", { store: idb("long") });
    return { length: session.length, persisted: session.persisted };
  }, [context, LONG]);

test("a long text is saved, and goes on after a reload as if nothing had happened", async (t) => {
  await open(LENGTH + AFTER);
  const began = Date.now();
  await page.evaluate(async (text) => {
    await session.append(text);
    await session.save({ rings: "saved" });
  }, text);
  t.diagnostic(`${LENGTH} tokens read and saved in ${Math.round((Date.now() - began) / 1000)} s`);
  // A fork never left, and goes on in this page; the session itself does after the reload.
  const stayed = await page.evaluate(async (maxTokens) => (await all((await session.fork()).generate({ maxTokens }))).ids, AFTER);
  assert.ok(stayed.length > 0);

  await browser.reload(page);
  browser.server.log.length = 0;
  const back = Date.now();
  assert.deepEqual(await open(LENGTH + AFTER), { length: LENGTH, persisted: true });
  const found = await page.evaluate(async (maxTokens) => {
    const { ids } = await all(session.generate({ maxTokens }));
    return { ids, replayed: session.replayed, weights: engine.weights };
  }, AFTER);
  t.diagnostic(`opened and ${AFTER} tokens made in ${Math.round((Date.now() - back) / 1000)} s`);
  assert.deepEqual(found.ids, stayed);
  assert.equal(found.replayed, 0);
  assert.equal(found.weights, "opfs");
  assert.equal(browser.server.sent(/safetensors$/).bytes, 0, "no weight comes over the network again");
});

test("without saved rings, a bounded number of rows is computed again, and the restore is the same each time", async () => {
  await page.evaluate(async (length) => {
    await session.truncate(length);
    await session.save({ rings: "replay" });
  }, LENGTH);
  const made = [];
  for (let visit = 0; visit < 2; visit++) {
    await browser.reload(page);
    await open(LENGTH + AFTER);
    const found = await page.evaluate(async () => ({ ids: (await all(session.generate({ maxTokens: 8 }))).ids, replayed: session.replayed }));
    assert.ok(found.replayed > 0 && found.replayed <= BOUND, `${found.replayed} rows`);
    made.push(found.ids);
  }
  assert.deepEqual(made[0], made[1]);
});

test("generations leave memory as it was", async () => {
  const counted = await page.evaluate(async (generations) => {
    engine.close();
    const wasm = (await (await import("/pkg/wasm/cedra.js")).default()).memory;
    const own = await load({ worker: false });
    const session = await own.session();
    await session.append([0, 5, 6, 7, 8, 9]);
    const seen = [];
    for (let i = 0; i < generations; i++) {
      await all(session.generate({ maxTokens: 2, seed: i, temperature: 1 }));
      await session.truncate(6);
      const { buffers, allocated } = await own.counters();
      seen.push({ buffers, ...allocated, wasm: wasm.buffer.byteLength });
    }
    own.close();
    return seen;
  }, GENERATIONS);
  // The first rounds make what is kept.
  const settled = counted.slice(2);
  assert.equal(counted.length, GENERATIONS);
  for (const now of settled) assert.deepEqual(now, settled[0]);
});
