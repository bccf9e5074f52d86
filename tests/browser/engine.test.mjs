// The engine in a browser makes the tokens that it makes natively, in a worker and in the page, from every source.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { expected, pocket, start } from "./harness.mjs";

let browser, page;
const shard = /safetensors$/;

before(async () => {
  browser = await start();
  page = await browser.page();
});
after(() => browser.close());

test("memory is planned from config.json alone", async () => {
  const plan = await page.evaluate(() => Engine.plan("/golden/", { context: 1024 }));
  const more = await page.evaluate(() => Engine.plan("/golden/", { context: 2048 }));
  const total = (plan) => Object.values(plan).flatMap((value) => (typeof value === "number" ? [value] : [])).reduce((a, b) => a + b, 0);
  assert.ok(total(plan) > 0 && total(more) > total(plan), JSON.stringify([plan, more]));
  assert.equal(browser.server.sent(/./).requests > 0, true);
  assert.equal(browser.server.sent(/tokenizer|safetensors$/).requests, 0);
});

test("greedy tokens are the native ones, in a worker and in the page", async () => {
  for (const [worker, cases] of [[true, expected.cases], [false, expected.cases.slice(0, 2)]]) {
    const found = await page.evaluate(
      async ([cases, worker]) => {
        const heard = [];
        // In the worker as users have it, several rows at a time; in the page row by row.
        const engine = await load({ worker, ...(worker && { chunk: undefined }), onProgress: (progress) => heard.push(progress) });
        const results = [];
        for (const { prompt, prefill } of cases) {
          const session = await engine.session();
          const read = [];
          await session.append(prompt, { prefill, reuse: false, onProgress: ({ done, total }) => read.push([done, total]) });
          const made = await all(session.generate({ maxTokens: 32 }));
          const tokens = [...(await session.tokens())];
          results.push({ ...made, read, tokens, length: session.length, remaining: session.remaining, rows: session.layerRows });
          await session.close();
        }
        const { info, version, weights } = engine;
        engine.close();
        return { heard, results, info, version, weights };
      },
      [cases, worker],
    );
    assert.equal(found.weights, "opfs");
    assert.match(found.version, /^\d+\.\d+\.\d+/);
    for (const stage of ["download", "load"]) {
      const heard = found.heard.filter((progress) => progress.stage === stage);
      assert.ok(heard.length > 0, stage);
      assert.ok(heard.every(({ loaded, total }, i) => loaded <= total && loaded >= (heard[i - 1]?.loaded ?? 0)), JSON.stringify(heard));
      assert.equal(heard.at(-1).loaded, heard.at(-1).total, stage);
    }
    for (const [i, { prompt, prefill, ids, text, finish }] of cases.entries()) {
      const result = found.results[i];
      const what = `${prompt.length} tokens, ${prefill}, worker ${worker}`;
      assert.deepEqual(result.ids, ids, what);
      assert.deepEqual([result.text, result.finish], [text, finish], what);
      assert.deepEqual(result.tokens, [...prompt, ...ids], what);
      assert.equal(result.length, prompt.length + ids.length);
      assert.equal(result.remaining, 256 - result.length);
      assert.equal(result.rows.length, 12);
      assert.deepEqual(result.read.at(-1)?.[0], result.read.at(-1)?.[1], what);
    }
  }
});

test("logits are those of the native build", async (t) => {
  const found = await page.evaluate(async (prompts) => {
    const wasm = await import("/wasm-tests/cedra.js");
    await wasm.default();
    const names = ["config.json", "tokenizer.json", "model.safetensors"];
    const files = new Map();
    for (const name of names) files.set(name, await (await fetch(`/golden/${name}`)).blob());
    const engine = await wasm.WasmEngine.load(files, { context: 256, chunk: 1 });
    const rows = [];
    for (const prompt of prompts) {
      const session = await engine.session();
      await session.append(Uint32Array.from(prompt), { prefill: "full", reuse: false });
      await (await session.generate({ maxTokens: 1 })).next();
      rows.push([...(await wasm.logits(engine))]);
      session.close();
    }
    return rows;
  }, expected.cases.map(({ prompt }) => prompt));
  for (const [i, { prompt, logits }] of expected.cases.entries()) {
    const largest = Math.max(...logits.map(Math.abs));
    const worst = Math.max(...logits.map((logit, id) => Math.abs(logit - found[i][id]))) / largest;
    t.diagnostic(`${prompt.length} tokens: ${worst.toExponential(1)} of the largest logit`);
    assert.ok(worst < 1e-4, `${prompt.length} tokens: ${worst}`);
  }
});

test("with subgroups and without, logits are the same bits", async (t) => {
  const page = await browser.page();
  const found = await page.evaluate(async (prompt) => {
    const { askForSubgroups } = await import("/pkg/dist/subgroups.js");
    const wasm = await import("/wasm-tests/cedra.js");
    await wasm.default();
    const files = new Map();
    for (const name of ["config.json", "tokenizer.json", "model.safetensors"]) {
      files.set(name, await (await fetch(`/golden/${name}`)).blob());
    }
    const run = async () => {
      const engine = await wasm.WasmEngine.load(files, { context: 256, chunk: 1 });
      const session = await engine.session();
      await session.append(Uint32Array.from(prompt), { prefill: "full", reuse: false });
      await (await session.generate({ maxTokens: 1 })).next();
      const logits = [...new Uint32Array((await wasm.logits(engine)).buffer)];
      const kernels = Object.keys(engine.counters.dispatchesByKernel);
      session.close();
      return { used: engine.info.features.subgroups, kernels: kernels.filter((name) => /sub$/.test(name)), logits };
    };
    // What nobody has asked for, no device has.
    const plain = await run();
    askForSubgroups();
    return { offered: (await isSupported()).features.includes("subgroups"), plain, with: await run() };
  }, expected.cases[0].prompt);
  assert.deepEqual([found.plain.used, found.plain.kernels], [false, []]);
  if (!found.offered) return t.skip("this browser's adapter has no subgroups");
  assert.equal(found.with.used, true);
  assert.deepEqual(found.with.kernels.sort(), ["boundary/r1_sub", "engram_gate/sub", "experts_down/r1_sub", "experts_up/r1_sub", "linear/r1_sub"]);
  assert.ok(found.with.logits.length > 0);
  assert.deepEqual(found.with.logits, found.plain.logits);
});

test("the pocket model answers as it did in the framework that trained it", async () => {
  // All seven with CEDRA_ALL_PROMPTS=1.
  const cases = process.env.CEDRA_ALL_PROMPTS ? pocket.cases : pocket.cases.slice(3, 5);
  const found = await page.evaluate(async (cases) => {
    const engine = await Engine.load("/pocket/", { context: 1024, chunk: 1, worker: false });
    const results = [];
    for (const { prompt_ids, prompt } of cases) {
      const session = await engine.session();
      await session.append(prompt_ids, { prefill: "exact" });
      results.push({ ...(await all(session.generate({ maxTokens: 31 }))), encoded: [...(await engine.encode(prompt, true))] });
      await session.close();
    }
    engine.close();
    return results;
  }, cases);
  for (const [i, { generated_ids, prompt_ids, prompt }] of cases.entries()) {
    const made = found[i].ids;
    assert.deepEqual(made.slice(0, generated_ids.length - 1), generated_ids.slice(0, Math.min(31, generated_ids.length - 1)), prompt);
    assert.deepEqual(found[i].encoded, prompt_ids.slice(prompt_ids.length - found[i].encoded.length));
  }
});

test("files, a directory and a map are sources too", async () => {
  const made = await page.evaluate(async (ids) => {
    const names = ["config.json", "tokenizer.json", "model.safetensors"];
    const blobs = await Promise.all(names.map(async (name) => (await fetch(`/golden/${name}`)).blob()));
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("picked", { create: true });
    for (const [i, name] of names.entries()) {
      const stream = await (await folder.getFileHandle(name, { create: true })).createWritable();
      await stream.write(blobs[i]);
      await stream.close();
    }
    const sources = [new Map(names.map((name, i) => [name, blobs[i]])), names.map((name, i) => new File([blobs[i]], name)), folder];
    const made = [];
    for (const source of sources) {
      const engine = await Engine.load(source, { context: 64, chunk: 1, worker: false });
      const session = await engine.session();
      await session.append(ids);
      made.push([engine.weights, ...(await all(session.generate({ maxTokens: 1 }))).ids]);
      engine.close();
    }
    return made;
  }, expected.cases[0].prompt);
  for (const ids of made) assert.deepEqual(ids, ["files", expected.cases[0].ids[0]]);
});

test("what is wrong with a model is a typed error, and the next load is good", async () => {
  const errors = await page.evaluate(async () => {
    const file = async (name) => (await fetch(`/golden/${name}`)).blob();
    const good = new Map();
    for (const name of ["config.json", "tokenizer.json", "model.safetensors"]) good.set(name, await file(name));
    const config = JSON.parse(await good.get("config.json").text());
    config.text_config.num_hidden_layers = 13;
    const changed = (name, blob) => new Map([...good, [name, blob]]);
    const without = (name) => new Map([...good].filter(([known]) => known !== name));
    const found = {};
    found.config = await refusal(Engine.load(changed("config.json", new Blob([JSON.stringify(config)]))));
    found.cut = await refusal(Engine.load(changed("model.safetensors", good.get("model.safetensors").slice(0, 1_000_000))));
    found.noWeights = await refusal(Engine.load(without("model.safetensors")));
    found.noConfig = await refusal(Engine.load(without("config.json")));
    found.noFolder = await refusal(Engine.load("/nowhere/"));
    found.badUrl = await refusal(Engine.load("http://:::"));
    const abort = new AbortController();
    found.aborted = await refusal(Engine.load(good, { signal: abort.signal, onProgress: () => abort.abort("changed my mind") }));
    (await Engine.load(good, { context: 64, chunk: 1, worker: false })).close();
    return found;
  });
  for (const error of Object.values(errors)) assert.equal(error.name, "CedraError");
  assert.ok(["CONFIG", "TENSOR"].includes(errors.config.code), JSON.stringify(errors.config));
  assert.ok(["MALFORMED", "TENSOR"].includes(errors.cut.code), JSON.stringify(errors.cut));
  assert.ok(["MALFORMED", "TENSOR", "IO"].includes(errors.noWeights.code), JSON.stringify(errors.noWeights));
  assert.deepEqual([errors.noConfig.code, errors.noFolder.code, errors.badUrl.code], ["NOT_FOUND", "NOT_FOUND", "ARGUMENT"]);
  assert.deepEqual([errors.aborted.code, errors.aborted.cause], ["ABORTED", "changed my mind"]);
});

test("a cut, corrupt or replaced download does not load, and loads once it is whole", async () => {
  const path = "/golden/model.safetensors";
  const load = (clear) =>
    page.evaluate(async (clear) => {
      if (clear) await (await navigator.storage.getDirectory()).removeEntry("cedra", { recursive: true }).catch(() => {});
      try {
        (await load()).close();
        return "loaded";
      } catch ({ code }) {
        return code;
      }
    }, clear);
  for (const fault of [{ cut: 1_000_000 }, { html: true, head: true }, { corrupt: 9 }, { status: 500 }]) {
    browser.server.faults.set(path, fault);
    const got = await load(true);
    browser.server.faults.delete(path);
    if (fault.cut) assert.equal(got, "loaded", "it goes on from byte to byte");
    else assert.equal(got, "DOWNLOAD", JSON.stringify(fault));
    assert.equal(await load(false), "loaded");
  }
  browser.server.log.length = 0;
  assert.equal(await load(false), "loaded");
  assert.equal(browser.server.sent(shard).bytes, 0);
});

test("a worker that dies rejects what waits, and a new engine is good", async () => {
  const found = await page.evaluate(async () => {
    const worker = new Worker("/pkg/dist/worker.js", { type: "module" });
    const engine = await load({ worker });
    const session = await engine.session();
    const waiting = refusal(session.append([0, 5, 6]));
    worker.terminate();
    const late = await refusal(waiting.then(() => session.append([7])));
    const broken = await refusal(Engine.load("/golden/", { worker: new Worker("/pkg/dist/nowhere.js", { type: "module" }) }));
    const again = await load();
    const closing = again.counters();
    again.close();
    return [await waiting, late, broken, await refusal(closing), await refusal(again.counters())].map(({ code }) => code);
  });
  assert.deepEqual(found, ["WORKER", "WORKER", "WORKER", "ENGINE_CLOSED", "ENGINE_CLOSED"]);
});
