// A headless Chromium with WebGPU on the CPU, pages that have the package, and a server that can misbehave.
//
// CEDRA_CHROMIUM is the browser. CEDRA_BROWSER_DRIVER is the library built from driver.c, with which WebGPU runs on the driver of
// VK_DRIVER_FILES; without it, it runs on Chromium's own SwiftShader, which takes ten times as long.

import { mkdtemp, readdir, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";
import { serve } from "./server.mjs";

const root = new URL("../..", import.meta.url).pathname;
export const FLAGS = [
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--disable-quic",
  "--disable-extensions",
];

/** What the browser's processes find in their environment. */
export function environment(driver = process.env.CEDRA_BROWSER_DRIVER) {
  return driver ? { ...process.env, LD_PRELOAD: driver } : process.env;
}

export const expected = JSON.parse(await readFile(join(root, "tests/browser/expected.json"), "utf8"));
export const pocket = JSON.parse(await readFile(join(root, "tests/fixtures/pocket/expected.json"), "utf8"));

const PAGE = `<!doctype html><meta charset="utf-8"><title>cedra</title><link rel="icon" href="data:,">
<script type="module">
  import * as cedra from "/pkg/dist/index.js";
  Object.assign(globalThis, cedra, { ready: true });
  /** The golden model. It reads row by row, unless told otherwise: a software GPU takes seconds to compile a kernel for several. */
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

/** The processes whose command line names this profile, or whose parent is one of those. */
async function processes(profile) {
  const found = new Map();
  for (const pid of await readdir("/proc")) {
    if (!/^\d+$/.test(pid)) continue;
    const stat = await readFile(`/proc/${pid}/stat`, "utf8").catch(() => "");
    const command = await readFile(`/proc/${pid}/cmdline`, "utf8").catch(() => "");
    const [state, parent] = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
    if (state && state !== "Z") found.set(Number(pid), { parent: Number(parent), own: command.includes(profile) });
  }
  const mine = new Set([...found].filter(([, { own }]) => own).map(([pid]) => pid));
  for (let size = -1; size !== mine.size; ) {
    size = mine.size;
    for (const [pid, { parent }] of found) if (mine.has(parent)) mine.add(pid);
  }
  return [...mine];
}

/**
 * A browser with its own storage, and a server, which has `mounts` besides the package and the models. `close` ends both. `driver` as in
 * CEDRA_BROWSER_DRIVER; "" for SwiftShader.
 */
export async function start(mounts = {}, { driver } = {}) {
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
      env: environment(driver),
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
    /** Ends every process of the browser at once when `moment` has come, as a crash would, and starts it again with the same storage. */
    kill: async (moment) => {
      const gone = new Promise((done) => context.once("close", done));
      let mine = await processes(profile);
      await moment();
      while (mine.length > 0) {
        for (const pid of mine) {
          try {
            process.kill(pid, "SIGKILL");
          } catch {
            // It went with another.
          }
        }
        mine = await processes(profile);
      }
      await gone;
      context = await launch();
    },
    /** Bytes of memory that the browser's processes hold together. */
    memory: async () => {
      const held = (await processes(profile)).map(async (pid) => {
        const status = await readFile(`/proc/${pid}/smaps_rollup`, "utf8").catch(() => "");
        return 1024 * Number(/^Pss:\s+(\d+)/m.exec(status)?.[1] ?? 0);
      });
      return (await Promise.all(held)).reduce((sum, bytes) => sum + bytes, 0);
    },
    close: async () => {
      await context.close();
      await server.close();
      await rm(profile, { recursive: true, force: true });
    },
  };
}
