// What the documents show runs as it stands there.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { start } from "./harness.mjs";

let browser;
before(async () => (browser = await start()));
after(() => browser.close());

test("the lines of the package's README, with which that of the project begins", async () => {
  const read = (path) => readFile(new URL(`../../${path}`, import.meta.url), "utf8");
  const readme = await read("pkg/README.md");
  const [, shown] = /```js\n([^]*?)```/.exec(await read("README.md"));
  assert.ok(readme.includes(shown), "the project's README shows the same lines");
  // One after the other; those for Node are run there.
  const code = [...readme.matchAll(/```js\n([^]*?)```/g)].map(([, block]) => block).join("\n");
  const html = `<!doctype html><link rel="icon" href="data:,"><p id="out"></p>
    <script type="importmap">{ "imports": { "cedra": "/cedra.js" } }</script>
    <script>
      const out = document.querySelector("#out");
      const longText = "ab";
      addEventListener("unhandledrejection", ({ reason }) => (globalThis.failed = String(reason)));
      addEventListener("error", ({ message }) => (globalThis.failed = message));
    </script>
    <script type="module">${code}; Object.assign(globalThis, { done: true, session });</script>`;
  // The package, reading row by row: that takes the fewest kernels, which the software GPU compiles slowly.
  const shim = `import { Engine as Whole } from "/pkg/dist/index.js";
    export * from "/pkg/dist/index.js";
    export const Engine = { load: (source, options) => Whole.load(source, { chunk: 1, ...options }) };`;
  const page = await browser.bare();
  await page.route("**/cedra.js", (route) => (new URL(route.request().url()).pathname === "/cedra.js" ? route.fulfill({ contentType: "text/javascript", body: shim }) : route.continue()));
  await page.route("**/readme.html", (route) => route.fulfill({ contentType: "text/html", body: html }));
  await page.route("**/models/tiny/*", (route) => route.continue({ url: route.request().url().replace("/models/tiny/", "/golden/") }));
  const lengths = [];
  for (let visit = 0; visit < 2; visit++) {
    await page.goto(`${browser.server.url}/readme.html`);
    await page.waitForFunction(() => globalThis.done || globalThis.failed, null, { timeout: 600_000 });
    assert.equal(await page.evaluate(() => globalThis.failed), undefined);
    assert.ok((await page.textContent("#out")).length > 0);
    lengths.push(await page.evaluate(() => (session.persisted ? session.length : -1)));
  }
  assert.ok(lengths[0] > 20 && lengths[1] > lengths[0], String(lengths));
  await page.close();
});

test("the example page reads, continues, stops, and knows it all after a reload", async () => {
  const page = await browser.bare();
  await page.goto(`${browser.server.url}/examples/index.html`);
  const saved = () => page.waitForFunction(() => /[1-9]\d* tokens.*, saved$/.test(document.querySelector("#status").textContent));
  // Few tokens, for the sake of the software GPU.
  await page.fill("textarea", "Rust");
  await page.click("text=Read and continue");
  await saved();
  const text = await page.textContent("output");
  assert.ok(text.startsWith("Rust") && text.length > 60, text);
  await page.reload();
  await saved();
  assert.equal(await page.textContent("output"), text);
  await page.fill("textarea", " Then");
  await page.click("text=Read and continue");
  await page.waitForFunction((length) => document.querySelector("output").textContent.length > length, text.length + 8);
  await page.click("text=Stop");
  await saved();
  assert.ok((await page.textContent("output")).startsWith(`${text} Then`));
  await page.click("text=Forget");
  await page.waitForFunction(() => /^0 tokens/.test(document.querySelector("#status").textContent));
  await page.close();
});
