// The package as it is published, in an application that a bundler has built: worker and wasm are found, and a model loads.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { build } from "vite";
import webpack from "webpack";
import { start } from "./harness.mjs";

const root = new URL("../..", import.meta.url).pathname;
let app, browser;

before(async () => {
  app = await mkdtemp(join(tmpdir(), "cedra-app-"));
  await mkdir(join(app, "node_modules/cedra"), { recursive: true });
  const [{ filename }] = JSON.parse(
    execFileSync("npm", ["pack", "--json", "--ignore-scripts", "--pack-destination", app], { cwd: join(root, "pkg"), stdio: ["ignore", "pipe", "ignore"] }),
  );
  execFileSync("tar", ["-xzf", join(app, filename), "--strip-components=1", "-C", join(app, "node_modules/cedra")]);
  await writeFile(join(app, "package.json"), '{ "type": "module", "private": true }');
  await writeFile(join(app, "index.html"), '<!doctype html><link rel="icon" href="data:,"><script type="module" src="/main.js"></script>');
  await writeFile(
    join(app, "main.js"),
    `import { Engine } from "cedra";
     const results = [];
     for (const worker of [true, false]) {
       const engine = await Engine.load("/golden/", { context: 64, worker });
       results.push([engine.info.layers.length, await engine.decode(await engine.encode("as ever"))]);
       engine.close();
     }
     globalThis.results = results;`,
  );
  browser = await start({ "/vite/": join(app, "vite"), "/webpack/": join(app, "webpack") });
});
after(async () => {
  await browser.close();
  await rm(app, { recursive: true });
});

const runs = async (path) => {
  const page = await browser.context.newPage();
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  await page.goto(`${browser.server.url}${path}index.html`);
  await page.waitForFunction(() => globalThis.results, null, { timeout: 60_000 }).catch(() => {});
  assert.deepEqual(problems, []);
  assert.deepEqual(await page.evaluate(() => globalThis.results), [[12, "as ever"], [12, "as ever"]]);
  await page.close();
};

test("Vite", async () => {
  await build({ root: app, base: "/vite/", logLevel: "error", build: { outDir: "vite", target: "esnext" } });
  await runs("/vite/");
});

test("webpack", async () => {
  const stats = await new Promise((resolve, reject) =>
    webpack(
      { mode: "production", context: app, entry: "./main.js", output: { path: join(app, "webpack"), publicPath: "/webpack/" } },
      (error, stats) => (error ? reject(error) : resolve(stats)),
    ),
  );
  assert.equal(stats.hasErrors(), false, stats.toString("errors-only"));
  const html = await readFile(join(app, "index.html"), "utf8");
  await writeFile(join(app, "webpack/index.html"), html.replace('type="module" src="/main.js"', 'defer src="main.js"'));
  await runs("/webpack/");
});
