// The store in IndexedDB does what every store must, in a page and in a worker; and a panic ends every promise. No GPU takes part.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { start } from "./harness.mjs";

let browser;
before(async () => (browser = await start()));
after(() => browser.close());

const work = (name) => `
  const wasm = await import(location.origin + "/wasm-tests/cedra.js");
  await wasm.default();
  await wasm.conformance("${name}");
  return "conforms";`;

test("IndexedDB conforms", async () => {
  const page = await browser.page();
  const found = await page.evaluate(async (work) => new (async () => {}).constructor(work)(), work("page"));
  assert.equal(found, "conforms");
  await page.close();
});

test("in a worker too", async () => {
  const page = await browser.page();
  const found = await page.evaluate(async (work) => {
    const source = `const origin = ${JSON.stringify(location.origin)}; const location = { origin };
      onmessage = async () => postMessage(await (async () => {${work}})().catch((error) => String(error.message ?? error)));`;
    const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })), { type: "module" });
    worker.postMessage(0);
    return new Promise((done) => (worker.onmessage = ({ data }) => done(data)));
  }, work("worker"));
  assert.equal(found, "conforms");
  await page.close();
});

test("a panic rejects what is open and what comes after", async () => {
  const page = await browser.context.newPage();
  await page.goto(`${browser.server.url}/page.html`);
  const codes = await page.evaluate(async () => {
    const wasm = await import("/wasm-tests/cedra.js");
    await wasm.default();
    const code = (call) => call.then(() => "fine", ({ code }) => code);
    const [open, panic] = [code(wasm.conformance("panic")), code(wasm.panics())];
    const found = [await panic, await open];
    return [...found, await code(wasm.WasmStore.indexedDb("after"))];
  });
  assert.deepEqual(codes, ["INTERNAL", "INTERNAL", "INTERNAL"]);
  await page.close();
});
