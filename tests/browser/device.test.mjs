// What becomes of an engine whose device fails: it is lost and comes back, memory runs out, kernels are tested on it. Chromium's own
// driver is what is used here, whatever the other tests have: a second one, and the browser as it comes.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { expected, start } from "./harness.mjs";

/** In the worker: its device can be lost, its adapters hidden, and buffers refused whose label begins with a word. */
const PRELUDE = `
let device, hidden = false, refused;
const requestDevice = GPUAdapter.prototype.requestDevice;
GPUAdapter.prototype.requestDevice = async function (descriptor) {
  return (device = await requestDevice.call(this, descriptor));
};
const requestAdapter = GPU.prototype.requestAdapter;
GPU.prototype.requestAdapter = function (options) {
  return hidden ? Promise.resolve(null) : requestAdapter.call(this, options);
};
const createBuffer = GPUDevice.prototype.createBuffer;
GPUDevice.prototype.createBuffer = function (descriptor) {
  // What the device cannot give it says later, as with memory that is short.
  const size = refused && descriptor.label?.startsWith(refused) ? this.limits.maxBufferSize + 16 : descriptor.size;
  return createBuffer.call(this, { ...descriptor, size });
};
const channel = new BroadcastChannel("device");
channel.onmessage = async ({ data }) => {
  if (data.lose) {
    device.destroy();
    await device.lost;
  }
  if ("hide" in data) hidden = data.hide;
  if ("refuse" in data) refused = data.refuse;
  channel.postMessage({ done: data.id });
};
`;

let browser, page;
const shard = /safetensors$/;

before(async () => {
  const worker = Buffer.from('import "/device/prelude.js"; import "/pkg/dist/worker.js";');
  browser = await start({ "/device/": new Map([["prelude.js", Buffer.from(PRELUDE)], ["worker.js", worker]]) }, { driver: "" });
  page = await browser.page();
  await page.evaluate(async () => {
    const channel = new BroadcastChannel("device");
    let number = 0;
    /** Tells the worker something, and waits until it has heard. */
    globalThis.tell = (what) =>
      new Promise((done) => {
        const id = ++number;
        const heard = ({ data }) => data.done === id && (channel.removeEventListener("message", heard), done());
        channel.addEventListener("message", heard);
        channel.postMessage({ ...what, id });
      });
    globalThis.engine = await load({ worker: new Worker("/device/worker.js", { type: "module" }) });
  });
});
after(() => browser.close());

const prompt = expected.cases[0].prompt;
const control = expected.cases[0].ids;

test("what is used of the device is said as it is", async () => {
  const { features, adapter } = await page.evaluate(() => engine.info);
  const offered = (await page.evaluate(() => isSupported())).features;
  // No kernel has a use for half floats, and nobody measures times.
  const subgroups = offered.includes("subgroups");
  assert.deepEqual({ ...features, dot4: true }, { f16: false, subgroups, dot4: true, timestamps: false });
  assert.equal(typeof adapter.description, "string");
});

test("a session for which there is no memory is refused, and the others go on", async () => {
  const found = await page.evaluate(async (prompt) => {
    const session = await engine.session();
    await session.append(prompt, { prefill: "exact" });
    await tell({ refuse: "window ring" });
    const opening = await refusal(engine.session());
    const forking = await refusal(session.fork());
    await tell({ refuse: undefined });
    const { ids } = await all(session.generate({ maxTokens: 4 }));
    await session.close();
    return { opening, forking, ids };
  }, prompt);
  for (const error of [found.opening, found.forking]) {
    assert.equal(error.code, "DEVICE", JSON.stringify(error));
    assert.match(error.message, /window ring of layer 0/);
  }
  assert.deepEqual(found.ids, control.slice(0, 4));
});

test("pages for which there is no memory are refused before any token, and the text stays as it was", async () => {
  const found = await page.evaluate(async (prompt) => {
    // A slab has two pages, so that the third session needs another.
    const sessions = [];
    for (let i = 0; i < 3; i++) sessions.push(await engine.session());
    const [a, b, c] = sessions;
    for (const session of [a, b]) await session.append(prompt, { prefill: "exact", reuse: false });
    await tell({ refuse: "page slab" });
    const reading = await refusal(c.append(prompt, { prefill: "exact", reuse: false }));
    const length = c.length;
    await tell({ refuse: undefined });
    await c.append(prompt, { prefill: "exact", reuse: false });
    const ids = [];
    for (const session of sessions) {
      ids.push((await all(session.generate({ maxTokens: 2 }))).ids);
      await session.close();
    }
    return { reading, length, ids };
  }, prompt);
  assert.equal(found.reading.code, "DEVICE", JSON.stringify(found.reading));
  assert.match(found.reading.message, /page slab 1/);
  assert.equal(found.length, 0);
  assert.deepEqual(found.ids, [control.slice(0, 2), control.slice(0, 2), control.slice(0, 2)]);
});

test("a lost device rejects what waits and what comes, and sessions go on after a recovery", async () => {
  const found = await page.evaluate(async (prompt) => {
    const exact = { prefill: "exact", reuse: false };
    const store = idb("recovered");
    globalThis.writing = await engine.session();
    globalThis.named = await engine.session("named", { store });
    globalThis.reading = await engine.session();
    globalThis.empty = await engine.session();
    await writing.append(prompt, exact);
    await named.append(prompt, exact);
    const before = (await all(named.generate({ maxTokens: 3 }))).ids;
    await named.save({ rings: "saved" });
    const unsaved = (await all(named.generate({ maxTokens: 2 }))).ids;

    const answer = writing.generate({ maxTokens: 200 });
    const made = [];
    const pending = refusal((async () => {
      for await (const { ids } of answer) {
        made.push(...ids);
        if (made.length >= 3) tell({ lose: true });
      }
    })());
    const read = refusal(reading.append([...prompt, ...Array.from({ length: 150 }, (_, i) => i % 50)], exact));
    const waiting = [await pending, await read];
    // Whoever was told no more than some of an answer has it all in the text.
    const text = [...(await writing.tokens())];
    const later = [];
    for (const call of [
      () => engine.session(),
      () => engine.session("other", { store }),
      () => named.append([1, 2]),
      () => all(named.generate({ maxTokens: 1 })),
      () => named.truncate(1),
      () => named.fork(),
      () => named.save(),
      () => engine.selfTest(),
    ]) later.push((await refusal(call())).code);
    const lengths = [writing.length, named.length, reading.length, empty.length];
    const words = await engine.decode(await engine.encode("still here"));
    return { before, unsaved, made, waiting, text, later, lengths, words, adapter: engine.info.adapter.name };
  }, prompt);
  assert.deepEqual([...found.before, ...found.unsaved], control.slice(0, 5));
  for (const error of found.waiting) {
    assert.deepEqual([error.name, error.code, error.data.reason], ["CedraError", "DEVICE_LOST", "destroyed"]);
    assert.equal(typeof error.data.message, "string");
    assert.ok(error.data.adapter.includes(found.adapter || "unnamed"), error.data.adapter);
  }
  assert.deepEqual(found.later, Array(8).fill("DEVICE_LOST"));
  const made = found.text.slice(prompt.length);
  assert.ok(made.length >= 3 && made.length < 200, `${made.length} tokens`);
  assert.deepEqual(made.slice(0, found.made.length), found.made);
  assert.deepEqual(found.lengths, [found.text.length, prompt.length + 5, 0, 0]);
  assert.equal(found.words, "still here");

  browser.server.log.length = 0;
  const again = await page.evaluate(async () => {
    await tell({ hide: true });
    const noGpu = await refusal(engine.recover());
    const still = await refusal(engine.session());
    await tell({ hide: false });
    const abort = new AbortController();
    const aborted = await refusal(engine.recover({ signal: abort.signal, onProgress: () => abort.abort("enough") }));
    const stages = new Set();
    const both = await Promise.all([engine.recover({ onProgress: ({ stage }) => stages.add(stage) }), engine.recover()]);
    const healthy = await engine.recover();
    const lengths = [writing, named, reading, empty].map(({ length }) => length);
    const persisted = named.persisted;
    const goesOn = [];
    for (const session of [writing, named]) goesOn.push((await all(session.generate({ maxTokens: 4 }))).ids);
    await reading.append([0, 5, 6]);
    await empty.append([0, 5, 6]);
    const saved = await named.save();
    return { noGpu, still, aborted, stages: [...stages], both, healthy, lengths, persisted, goesOn, saved, persistedNow: named.persisted };
  });
  assert.deepEqual([again.noGpu.code, again.still.code], ["NO_GPU", "DEVICE_LOST"]);
  assert.deepEqual([again.aborted.code, again.aborted.cause], ["ABORTED", "enough"]);
  assert.deepEqual(again.stages, ["load", "read"]);
  assert.deepEqual(again.both, [
    [
      { tokens: found.text.length, reread: found.text.length },
      { name: "named", tokens: prompt.length + 5, reread: 2 },
      { tokens: 0, reread: 0 },
      { tokens: 0, reread: 0 },
    ],
    [],
  ]);
  assert.deepEqual(again.healthy, []);
  assert.deepEqual(again.lengths, found.lengths);
  assert.equal(again.persisted, false);
  // What was made before the loss and what is made after it are the answer of one who never lost a device.
  const whole = await page.evaluate(async ([prompt, tokens]) => {
    const session = await engine.session();
    await session.append(prompt, { prefill: "exact", reuse: false });
    return (await all(session.generate({ maxTokens: tokens }))).ids;
  }, [prompt, made.length + 4]);
  assert.deepEqual([...made, ...again.goesOn[0]], whole);
  assert.deepEqual(again.goesOn[1], control.slice(5, 9));
  assert.ok(again.saved.records > 0 && again.persistedNow);
  assert.equal(browser.server.sent(shard).bytes, 0, "weights come from where they were kept");
});

test("a session that was not read exactly comes back too, and one that was cut since its last save is cut", async () => {
  const found = await page.evaluate(async (prompt) => {
    const store = idb("cut");
    const cut = await engine.session("cut", { store });
    await cut.append([...prompt, 7, 8, 9]);
    await cut.save();
    const same = await engine.session("same", { store });
    await same.append(prompt);
    await same.save();
    await cut.truncate(prompt.length + 1);
    await cut.append([11]);
    await tell({ lose: true });
    const report = (await engine.recover()).filter(({ name }) => name === "cut" || name === "same");
    const texts = [[...(await cut.tokens())], [...(await same.tokens())]];
    return { report, texts, persisted: [cut.persisted, same.persisted] };
  }, prompt);
  assert.deepEqual(found.report, [
    { name: "cut", tokens: prompt.length + 2, reread: 1 },
    { name: "same", tokens: prompt.length, reread: 0 },
  ]);
  assert.deepEqual(found.texts, [[...prompt, 7, 11], prompt]);
  assert.deepEqual(found.persisted, [false, true]);
});

test("every kernel does on this device what its twin does", async (context) => {
  const report = await page.evaluate(() => engine.selfTest());
  for (const { kernel, variant, ok, worst, allowed, message } of report.kernels) {
    assert.ok(ok && worst <= allowed, `${kernel}/${variant}: ${worst} of ${allowed}: ${message}`);
  }
  assert.ok(report.ok && report.kernels.length > 30, JSON.stringify(report));
  context.diagnostic(`${report.kernels.length} variants in ${Math.round(report.milliseconds)} ms on ${report.adapter}`);
});
