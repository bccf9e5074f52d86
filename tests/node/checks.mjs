// What must hold outside browsers, with the small golden model: run by Node and by Deno.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { Engine, idb, isSupported, memory } from "../../pkg/dist/index.js";

const root = new URL("../..", import.meta.url);
const model = new URL("tests/fixtures/golden/ckpt_fp8fp4/", root);
const expected = JSON.parse(await readFile(new URL("tests/browser/expected.json", root), "utf8"));

const all = async (answer) => {
  const ids = [];
  for await (const piece of answer) ids.push(...piece.ids);
  return ids;
};

/** Every check, one after the other, on one engine. `step` is told the name of each. */
export async function check(step) {
  step("the adapter is found");
  const { supported, missing } = await isSupported();
  assert.deepEqual([supported, missing], [true, []]);

  step("a plan from a path");
  const path = "tests/fixtures/golden/ckpt_fp8fp4";
  const plan = await Engine.plan(path, { context: 256 });
  assert.equal(plan.fits, true);
  await assert.rejects(Engine.plan("tests/fixtures/none", { context: 256 }), { name: "CedraError", code: "NOT_FOUND" });

  step("a model from a file: URL");
  // Row by row takes the fewest pipelines, and every row's bits are the same.
  const engine = await Engine.load(model, { context: 256, chunk: 1 });
  assert.equal(engine.weights, "files");
  for (const { prompt, prefill, ids } of expected.cases) {
    step(`32 tokens behind ${prompt.length}`);
    const session = await engine.session();
    await session.append(prompt, { prefill });
    assert.deepEqual(await all(session.generate({ maxTokens: 32 })), ids);
    await session.close();
  }

  step("a session in memory");
  const store = memory();
  const { prompt, left, more, found } = expected.session;
  const session = await engine.session("a", { store });
  await session.append(prompt);
  assert.deepEqual(await all(session.generate({ maxTokens: left.length })), left);
  await session.save();
  await session.close();
  const again = await engine.session("a", { store });
  await again.append(more);
  assert.deepEqual(await all(again.generate({ maxTokens: found.length })), found);
  await again.close();

  step("no IndexedDB");
  const lost = await engine.session("a", { store: idb("cedra") });
  assert.equal(lost.storeError?.code, "STORE");
  engine.close();
}
