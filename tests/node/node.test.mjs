// The package without a browser: in Node with the WebGPU of the npm package `webgpu`, and in Deno with its own. On the software GPU
// most of the time goes into compiling pipelines; the driver keeps them for the next time.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtemp, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { promisify } from "node:util";

const root = new URL("../..", import.meta.url).pathname;
const run = promisify(execFile);
const options = { cwd: root, timeout: 1_800_000 };
const deno = (...args) => run(join(root, "node_modules/.bin/deno"), ["run", "--quiet", "--unstable-webgpu", "--allow-read", "--allow-env", ...args], options);

test("Node gives the tokens that the native binary gives", async () => {
  const { stdout } = await run(process.execPath, ["tests/node/in-node.mjs"], options);
  assert.match(stdout, /all checks passed\n$/);
});

test("so does Deno", async () => {
  const { stdout } = await deno("tests/node/in-deno.ts");
  assert.match(stdout, /all checks passed\n$/);
});

test("the example answers, and reads nothing twice", async () => {
  const { stdout } = await run(process.execPath, ["examples/node/chat.mjs"], options);
  assert.match(stdout, /^> .*heron.*\nThe port of heron is 6077\.\n/m);
  const read = [...stdout.matchAll(/^(\d+) tokens, (\d+) of them known$/gm)].map(([, all, known]) => [Number(all), Number(known)]);
  assert.ok(read.length === 2 && read[0][1] === 0 && read[1][1] > 0.8 * read[0][0], stdout);
});

test("the README's lines", async () => {
  // In a folder of its own, as a user has them.
  const folder = await mkdtemp(join(tmpdir(), "cedra-node-"));
  try {
    await symlink(join(root, "node_modules"), join(folder, "node_modules"));
    await symlink(join(root, "models"), join(folder, "models"));
    const file = join(folder, "readme.mjs");
    const readme = await readFile(join(root, "pkg/README.md"), "utf8");
    await writeFile(file, /```js node\n([^]*?)```/.exec(readme)[1]);
    const { stdout } = await run(process.execPath, [file], { ...options, cwd: folder });
    assert.equal(stdout, "The port of heron is 6077.\n");
  } finally {
    await rm(folder, { recursive: true });
  }
});
