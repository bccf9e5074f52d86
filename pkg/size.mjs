// Prints what the package weighs, and refuses a wasm that has grown beyond its limit.

import { readdir, readFile } from "node:fs/promises";
import { gzipSync } from "node:zlib";

const LIMIT = 1_500_000; // bytes of the gzipped wasm

const here = (path) => new URL(path, import.meta.url);
const weigh = async (paths) => {
  const bytes = await Promise.all(paths.map((path) => readFile(here(path))));
  const sum = (sizes) => sizes.reduce((a, b) => a + b, 0);
  return [sum(bytes.map(({ length }) => length)), sum(bytes.map((bytes) => gzipSync(bytes, { level: 9 }).length))];
};
const kb = (bytes) => `${Math.round(bytes / 1000)} kB`;

const scripts = (await readdir(here("dist"))).filter((name) => name.endsWith(".js")).map((name) => `dist/${name}`);
for (const [what, paths] of [["facade and worker", scripts], ["glue", ["wasm/cedra.js"]], ["wasm", ["wasm/cedra_bg.wasm"]]]) {
  const [raw, packed] = await weigh(paths);
  console.log(`${what}: ${kb(raw)}, gzipped ${kb(packed)}`);
  if (what === "wasm" && packed > LIMIT) {
    console.error(`the wasm may take ${kb(LIMIT)} gzipped`);
    process.exit(1);
  }
}
