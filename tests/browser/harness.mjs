// A headless Chromium with WebGPU on the CPU, pages that have the package, and a server that can misbehave.

import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";
import { serve } from "./server.mjs";

const root = new URL("../..", import.meta.url).pathname;
const FLAGS = [
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--disable-quic",
  "--disable-extensions",
];

export const expected = JSON.parse(await readFile(join(root, "tests/browser/expected.json"), "utf8"));
export const pocket = JSON.parse(await readFile(join(root, "tests/fixtures/pocket/expected.json"), "utf8"));

const PAGE = `<!doctype html><meta charset="utf-8"><title>cedra</title><link rel="icon" href="data:,">
<script type="module">
  import * as cedra from "/pkg/dist/index.js";
  Object.assign(globalThis, cedra, { ready: true });
  /** The golden model. It reads row by row, unless told otherwise: the software GPU takes seconds to compile a kernel for several. */
  globalThis.load = (options) => cedra.Engine.load("/golden/", { context: 256, chunk: 1, ...options });
  /** What a call rejects with, as plain data. */
  globalThis.refusal = (call) => call.then(
    (value) => { throw new Error("not refused: " + JSON.stringify(value)); },
    ({ name, code, message, data, cause }) => ({ name, code, message, data, cause: cause && (cause.message ?? String(cause)) }),
  );
  /** All pieces of an answer. */
  globalThis.all = async (answer) => {
    const ids = [];
    let text = "", finish;
    for await (const piece of answer) { ids.push(...piece.ids); text += piece.text; finish = piece.finish; }
    return { ids, text, finish };
  };
</script>`;

/** A browser with its own storage, and a server, which has `mounts` besides the package and the models. `close` ends both. */
export async function start(mounts = {}) {
  const profile = await mkdtemp(join(tmpdir(), "cedra-browser-"));
  const server = await serve({
    ...mounts,
    "/pkg/": join(root, "pkg"),
    "/wasm-tests/": join(root, "target/web-tests"),
    "/golden/": join(root, "tests/fixtures/golden/ckpt_fp8fp4"),
    "/pocket/": join(root, "models/pocket"),
    "/examples/": join(root, "examples/web"),
    "/": new Map([["page.html", Buffer.from(PAGE)]]),
  });
  const launch = () =>
    chromium.launchPersistentContext(profile, {
      executablePath: process.env.CEDRA_CHROMIUM ?? "/usr/bin/chromium",
      headless: true,
      chromiumSandbox: false,
      args: FLAGS,
    });
  let context = await launch();
  const ready = async (page) => {
    await page.waitForFunction(() => globalThis.ready === true);
    return page;
  };
  return {
    server,
    get context() {
      return context;
    },
    /** A new tab with the package. What the tab prints as an error is printed here. */
    page: async () => {
      const page = await context.newPage();
      page.setDefaultTimeout(120_000);
      page.on("console", (message) => message.type() === "error" && !/^Failed to load resource/.test(message.text()) && console.error(`page: ${message.text()}`));
      page.on("pageerror", (error) => console.error(`page: ${error}`));
      await page.goto(`${server.url}/page.html`);
      return ready(page);
    },
    /** A new tab without the package. */
    bare: async () => {
      const page = await context.newPage();
      page.setDefaultTimeout(120_000);
      return page;
    },
    reload: async (page) => {
      await page.reload();
      return ready(page);
    },
    /** Ends the browser and starts it again with the same storage. */
    restart: async () => {
      await context.close();
      context = await launch();
    },
    close: async () => {
      await context.close();
      await server.close();
      await rm(profile, { recursive: true, force: true });
    },
  };
}
