// Builds the page: static files that work under any path. Besides what Vite does: the model beside the page, its checksums, and the list of
// files that the service worker keeps.

import { createHash } from "node:crypto";
import { cp, mkdir, open, readdir, readFile, writeFile } from "node:fs/promises";
import { join, relative } from "node:path";
import { defineConfig } from "vite";

const root = import.meta.dirname;
const dist = join(root, "dist");
const model = join(root, "../models/pocket");

/** Names of the tensors of a safetensors file. */
async function tensors(path) {
  const file = await open(path);
  try {
    const length = Buffer.alloc(8);
    await file.read(length, 0, 8, 0);
    const header = Buffer.alloc(Number(length.readBigUInt64LE()));
    await file.read(header, 0, header.length, 8);
    return Object.keys(JSON.parse(header.toString("utf8"))).filter((name) => name !== "__metadata__");
  } finally {
    await file.close();
  }
}

/** The model, with an index and checksums: what a host answers 404 to, a page that is offline cannot tell from a missing network. */
async function copyModel() {
  const to = join(dist, "model");
  const files = ["config.json", "tokenizer.json", "model.safetensors"];
  await mkdir(to, { recursive: true });
  for (const name of files) await cp(join(model, name), join(to, name));
  const map = Object.fromEntries((await tensors(join(model, "model.safetensors"))).map((name) => [name, "model.safetensors"]));
  await writeFile(join(to, "model.safetensors.index.json"), JSON.stringify({ weight_map: map }));
  const sums = await Promise.all(files.map(async (name) => [name, createHash("sha256").update(await readFile(join(to, name))).digest("hex")]));
  await writeFile(join(to, "checksums.json"), JSON.stringify(Object.fromEntries(sums)));
}

/** The service worker, with what it keeps: everything but the model, which the engine keeps itself. */
async function writeServiceWorker() {
  const entries = await readdir(dist, { recursive: true, withFileTypes: true });
  const paths = entries.filter((entry) => entry.isFile()).map((entry) => relative(dist, join(entry.parentPath, entry.name)).replaceAll("\\", "/"));
  const files = paths.filter((path) => path !== "sw.js" && !path.startsWith("model/")).sort();
  const hash = createHash("sha256");
  for (const path of files) hash.update(path).update(await readFile(join(dist, path)));
  const script = await readFile(join(root, "src/sw.js"), "utf8");
  const version = hash.digest("hex").slice(0, 16);
  await writeFile(join(dist, "sw.js"), script.replace('"__VERSION__"', JSON.stringify(version)).replace('["__FILES__"]', JSON.stringify(["./", ...files])));
}

export default defineConfig({
  root,
  base: "./",
  // Fonts and the wasm stay files of their own: the page's policy allows no data in their place.
  build: { outDir: dist, emptyOutDir: true, target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  worker: { format: "es" },
  plugins: [
    {
      name: "cedra-page",
      apply: "build",
      async closeBundle() {
        await copyModel();
        await writeServiceWorker();
      },
    },
  ],
});
