// Sessions that outlive the page: in IndexedDB, with one writer, and in memory where there is no storage.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { expected, start } from "./harness.mjs";

let browser, page;
const shard = /safetensors$/;
const WINDOW = 16;
/** Rows that a restore may compute again: the window, a group's remainder, the history of the n-grams. */
const BOUND = WINDOW + 1 + 3;

before(async () => {
  browser = await start();
  page = await browser.page();
});
after(() => browser.close());

/** Loads the engine in the tab if it has none, and opens a session of the store. */
const open = (tab, name, database = "cedra") =>
  tab.evaluate(
    async ([name, database]) => {
      globalThis.engine ??= await load();
      globalThis.session = await engine.session(name, { store: idb(database) });
      const { length, replayed, reused, persisted } = session;
      return { length, replayed, reused, persisted };
    },
    [name, database],
  );
const append = (tab, ids) => tab.evaluate(async (ids) => (await session.append(ids), session.persisted), ids);
const generate = (tab, maxTokens) => tab.evaluate(async (maxTokens) => (await all(session.generate({ maxTokens }))).ids, maxTokens);
const save = (tab, options = {}) => tab.evaluate(async (options) => ({ ...(await session.save(options)), persisted: session.persisted }), options);
const code = (tab, call) => tab.evaluate((call) => refusal(new Function(`return ${call}`)()), call);

test("after a reload a session goes on as it does natively, and no weight is fetched", async () => {
  const { prompt, left, more, found } = expected.session;
  assert.deepEqual(await open(page, "native"), { length: 0, replayed: 0, reused: 0, persisted: false });
  assert.equal(await append(page, prompt), false);
  assert.deepEqual(await generate(page, 4), left);
  const saved = await save(page);
  assert.ok(saved.persisted && saved.records > 0 && saved.bytes > 0);
  await browser.reload(page);
  browser.server.log.length = 0;
  const opened = await open(page, "native");
  assert.deepEqual([opened.length, opened.persisted], [prompt.length + 4, true]);
  await append(page, more);
  assert.deepEqual(await generate(page, 16), found);
  const replayed = await page.evaluate(() => session.replayed);
  assert.ok(replayed > 0 && replayed <= BOUND, `${replayed} rows`);
  assert.equal(browser.server.sent(shard).bytes, 0);
});

test("with saved rings the answer is what it would have been, at every phase", async () => {
  const { prompt } = expected.cases.find(({ prompt }) => prompt.length === 40);
  const controls = new Map();
  for (const length of [15, 16, 17, 34]) {
    await open(page, `phase ${length}`);
    await append(page, prompt.slice(0, length));
    await generate(page, 2);
    await save(page, { rings: "saved" });
    controls.set(length, await generate(page, 8));
  }
  await browser.reload(page);
  for (const [length, control] of controls) {
    assert.equal((await open(page, `phase ${length}`)).length, length + 2);
    assert.deepEqual(await generate(page, 8), control, `${length} tokens`);
    assert.equal(await page.evaluate(() => session.replayed), 0, `${length} tokens`);
  }
});

test("what a store holds is listed, measured and forgotten", async () => {
  await open(page, "kept", "list");
  await append(page, [0, 5, 6, 7, 8]);
  await save(page);
  const listed = await page.evaluate(async () => [await engine.sessions(idb("list")), await engine.usage(idb("list")), Date.now()]);
  const [[entry], usage, now] = listed;
  assert.deepEqual([entry.name, entry.tokens], ["kept", 5]);
  assert.ok(entry.bytes > 0 && entry.savedAt > now - 60_000 && entry.savedAt <= now, JSON.stringify(entry));
  assert.equal(usage.sessions, 1);
  assert.ok(usage.bytes > 0 && usage.available > 0);
  assert.equal((await code(page, 'engine.delete("kept", { store: idb("list") })')).code, "SESSION_BUSY");
  const rest = await page.evaluate(async () => {
    await session.close();
    const store = idb("list");
    return [await engine.delete("kept", { store }), await engine.delete("kept", { store }), await engine.sessions(store)];
  });
  assert.deepEqual(rest, [true, false, []]);
});

test("the second tab is refused until the first is closed or gone", async () => {
  const other = await browser.page();
  await open(page, "shared");
  await append(page, [0, 5, 6]);
  await save(page);
  await other.evaluate(async () => (globalThis.engine = await load()));
  const refused = await code(other, 'engine.session("shared", { store: idb("cedra") })');
  assert.deepEqual([refused.code, refused.data.session], ["SESSION_BUSY", "shared"]);
  assert.equal((await code(page, 'engine.session("shared", { store: idb("cedra") })')).code, "SESSION_BUSY");
  // Both tabs write to the same store, each its own session.
  await open(other, "its own");
  await append(other, [0, 9, 9]);
  await Promise.all([save(other), save(page)]);
  await page.evaluate(() => session.close());
  assert.equal((await open(other, "shared")).length, 3);
  // The lock goes with the tab.
  await other.close();
  assert.equal((await open(page, "shared")).length, 3);
});

test("a session saved elsewhere under a new name keeps both, and forks part", async () => {
  await open(page, "trunk");
  await append(page, [0, 5, 6, 7]);
  await save(page);
  const found = await page.evaluate(async () => {
    const fork = await session.fork();
    await fork.append([9, 9]);
    const nameless = await refusal(fork.save());
    const taken = await refusal(fork.save({ name: "trunk", store: idb("cedra") }));
    await fork.save({ name: "branch", store: idb("cedra") });
    await session.append([8]);
    await session.save();
    await fork.close();
    await session.close();
    const texts = [];
    for (const name of ["trunk", "branch"]) {
      const again = await engine.session(name, { store: idb("cedra") });
      texts.push([...(await again.tokens())]);
      await again.close();
    }
    return { texts, codes: [nameless.code, taken.code] };
  });
  assert.deepEqual(found, { texts: [[0, 5, 6, 7, 8], [0, 5, 6, 7, 9, 9]], codes: ["ARGUMENT", "SESSION_BUSY"] });
});

test("a prefix that a stored session has is not read again", async () => {
  const { prompt, ids } = expected.cases.find(({ prompt, prefill }) => prompt.length === 40 && prefill === "bounded");
  await open(page, "long");
  await append(page, prompt);
  await save(page);
  await browser.reload(page);
  const found = await page.evaluate(async (prompt) => {
    globalThis.engine = await load();
    await engine.attach(idb("cedra"));
    const session = await engine.session();
    const { reused } = await session.append(prompt);
    return { reused, mirrored: session.reused, ...(await all(session.generate({ maxTokens: 4 }))) };
  }, prompt);
  assert.ok(found.reused >= 16, `${found.reused} tokens`);
  assert.equal(found.mirrored, found.reused);
  assert.equal(found.ids.length, Math.min(4, ids.length));
});

test("the browser closed in the middle of saves leaves the last or the next state", async () => {
  await open(page, "killed", "killed");
  await append(page, [0, 5, 6, 7]);
  await save(page);
  await page.evaluate(() => {
    (async () => {
      // So many that no machine is through with them in time, and so few that an answer still fits.
      for (let i = 0; i < 80; i++) {
        await session.append([9, 10, 11]);
        await session.save();
      }
    })().catch(() => {});
  });
  await new Promise((done) => setTimeout(done, 700));
  await browser.restart();
  page = await browser.page();
  const opened = await open(page, "killed", "killed");
  assert.ok(opened.length >= 4 && (opened.length - 4) % 3 === 0, String(opened.length));
  const tokens = await page.evaluate(async () => [...(await session.tokens())]);
  assert.deepEqual(tokens, [0, 5, 6, 7, ...Array.from({ length: (opened.length - 4) / 3 }, () => [9, 10, 11]).flat()]);
  assert.equal((await generate(page, 4)).length, 4);
});

test("without storage a session goes on in memory and says so", async () => {
  const tab = await browser.page();
  const found = await tab.evaluate(async () => {
    IDBFactory.prototype.open = () => { throw new DOMException("denied", "SecurityError"); };
    const engine = await load({ worker: false });
    const session = await engine.session("notes", { store: idb("cedra") });
    await session.append([0, 5, 6]);
    const { ids } = await all(session.generate({ maxTokens: 4 }));
    const error = await refusal(session.save());
    const moved = await session.save({ name: "notes", store: memory() });
    const out = { ids, persisted: session.persisted, error, moved: moved.records > 0, storeError: session.storeError?.code };
    engine.close();
    return out;
  });
  assert.equal(found.ids.length, 4);
  assert.equal(found.error.code, "STORE");
  assert.deepEqual([found.persisted, found.moved, found.storeError], [true, true, undefined]);
  await tab.close();
});

test("a full disk refuses the save with the numbers; the text goes on and is saved once there is room", async () => {
  const fresh = await start();
  const tab = await fresh.page();
  await tab.evaluate(async () => (globalThis.engine = await load({ cache: false })));
  const devtools = await fresh.context.newCDPSession(tab);
  const { url: origin } = fresh.server;
  await devtools.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 20_000 });
  await open(tab, "big");
  await append(tab, expected.cases.at(-1).prompt);
  const error = await code(tab, "session.save()");
  assert.equal(error.code, "QUOTA", JSON.stringify(error));
  const control = await generate(tab, 4);
  assert.equal(control.length, 4);
  assert.equal(await tab.evaluate(() => session.persisted), false);
  await devtools.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 64 << 20 });
  assert.equal((await save(tab)).persisted, true);
  await fresh.close();
});
