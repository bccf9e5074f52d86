// Drafting in a browser: whatever is guessed, the text is the same; and what was guessed is told.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { start } from "./harness.mjs";

let browser, page;
before(async () => {
  browser = await start();
  page = await browser.page();
  page.setDefaultTimeout(0);
  await page.evaluate(async () => {
    globalThis.engine = await load({ draft: true, context: 120 });
    globalThis.origin = await engine.session();
    await origin.append(Array.from({ length: 40 }, (_, i) => (i === 0 ? 0 : 3 + ((i * i * 11 + i * 13 + 5) % 300))));
  });
});
after(() => browser.close());

/** An answer of a fork: ids, which of them had been guessed, and what was counted. */
const made = (options) =>
  page.evaluate(async (options) => {
    const session = await origin.fork();
    const [ids, drafted] = [[], []];
    for await (const piece of session.generate({ stopIds: [], ...options })) {
      ids.push(...piece.ids);
      drafted.push(...piece.drafted);
    }
    const { drafts } = session;
    session.close();
    return { ids, drafted, drafts };
  }, options);

test("greedy text is the same whatever is guessed, and what was guessed is told", async () => {
  const plain = await made({ maxTokens: 24, draft: "off" });
  assert.equal(plain.ids.length, 24);
  assert.ok(plain.drafted.every((one) => one === 0));
  for (const draft of [3, "auto"]) {
    const { ids, drafted, drafts } = await made({ maxTokens: 24, draft });
    assert.deepEqual(ids, plain.ids, `draft ${draft}`);
    const stood = drafts.accepted.reduce((a, b) => a + b, 0);
    assert.equal(drafted.filter((one) => one === 1).length, stood);
    assert.equal(drafts.rounds + stood, 24);
    assert.equal(drafts.tokens, 24);
    if (draft !== "auto") assert.ok(drafts.drafted === drafts.rounds && drafts.verified[draft - 1] > 0 && (drafts.verified[draft] ?? 0) === 0);
  }
});

test("a session is saved in the middle of a round, and goes on", async () => {
  const { seen, rest, again } = await page.evaluate(async () => {
    const session = await origin.fork();
    const ids = [];
    const answer = session.generate({ maxTokens: 16, stopIds: [], draft: 2 });
    for (let i = 0; i < 3; i++) ids.push(...(await answer.next()).value.ids);
    await session.save({ name: "round", store: memory(), rings: "saved" });
    for await (const piece of answer) ids.push(...piece.ids);
    const whole = await all((await origin.fork()).generate({ maxTokens: 16, stopIds: [], draft: "off" }));
    return { seen: ids, rest: whole.ids, again: session.persisted };
  });
  assert.deepEqual(seen, rest);
  assert.equal(again, false);
});

test("settings that mean nothing are refused, and the text stays", async () => {
  const refused = (draft) =>
    page.evaluate(async (draft) => {
      const session = await origin.fork();
      const error = await all(session.generate({ draft, maxTokens: 1 })).then(() => undefined, (error) => ({ code: error.code, message: error.message }));
      return { ...error, length: session.length };
    }, draft);
  for (const draft of [99, -1, 1.5, "3", "on"]) {
    const { code, message, length } = await refused(draft);
    assert.ok(code && /draft/.test(message), `${draft}: ${code} ${message}`);
    assert.equal(length, 40);
  }
});
