// Answers that are left, dropped, aborted or asked for twice, and sessions that are cut and forked: each time the next answer is
// what it would have been.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { expected, start } from "./harness.mjs";

let browser, page;
const { prompt, ids } = expected.cases[0];

before(async () => {
  browser = await start();
  page = await browser.page();
  await page.evaluate(async (prompt) => {
    globalThis.engine = await load();
    globalThis.fresh = async () => {
      const session = await engine.session();
      await session.append(prompt, { prefill: "exact" });
      return session;
    };
  }, prompt);
});
after(() => browser.close());

test("a loop that is left keeps what was made, and goes on with the next", async () => {
  const found = await page.evaluate(async () => {
    const session = await fresh();
    const seen = [];
    for await (const piece of session.generate({ maxTokens: 32 })) {
      seen.push(...piece.ids);
      if (seen.length >= 3) break;
    }
    const kept = [...(await session.tokens())];
    const rest = (await all(session.generate({ maxTokens: 8 }))).ids;
    await session.close();
    return { seen, kept, rest };
  });
  const kept = found.kept.slice(prompt.length);
  assert.ok(kept.length >= found.seen.length);
  assert.deepEqual([...kept, ...found.rest], ids.slice(0, kept.length + 8));
});

test("a dropped stream blocks nothing", async () => {
  const found = await page.evaluate(async () => {
    const session = await fresh();
    const dropped = session.generate({ maxTokens: 32 });
    await dropped.next();
    session.generate({ maxTokens: 4 });
    const kept = [...(await session.tokens())].length;
    await session.truncate(kept);
    const { ids } = await all(session.generate({ maxTokens: 8 }));
    const late = await refusal(dropped.next());
    const tokens = [...(await session.tokens())];
    await session.close();
    return { ids, late, tokens };
  });
  assert.deepEqual(found.tokens.slice(prompt.length), ids.slice(0, found.tokens.length - prompt.length));
  assert.equal(found.late.code, "SESSION_BUSY");
});

test("two streams at once: one goes on, the other is refused; on two sessions both go on", async () => {
  const found = await page.evaluate(async () => {
    const [a, b] = [await fresh(), await fresh()];
    const settled = (await Promise.allSettled([all(a.generate({ maxTokens: 12 })), all(a.generate({ maxTokens: 12 }))])).map(
      ({ value, reason }) => value?.ids ?? reason.code,
    );
    const text = [...(await a.tokens())];
    const c = await fresh();
    const both = await Promise.all([all(b.generate({ maxTokens: 12 })), all(c.generate({ maxTokens: 12 }))]);
    for (const session of [a, b, c]) await session.close();
    return { settled, text, both: both.map(({ ids }) => ids) };
  });
  assert.ok(found.settled.includes("SESSION_BUSY"), JSON.stringify(found.settled));
  assert.deepEqual(found.text.slice(prompt.length), ids.slice(0, found.text.length - prompt.length));
  assert.deepEqual(found.both, [ids.slice(0, 12), ids.slice(0, 12)]);
});

test("an abort at any moment leaves a session that answers as ever", async () => {
  const found = await page.evaluate(async () => {
    const results = [];
    for (const delay of [0, 20, 150, 600]) {
      const session = await fresh();
      const abort = new AbortController();
      setTimeout(() => abort.abort("enough"), delay);
      const outcome = await all(session.generate({ maxTokens: 40, signal: abort.signal })).then(
        () => "made all",
        ({ code, cause }) => [code, cause],
      );
      const kept = session.length;
      const rest = (await all(session.generate({ maxTokens: 4 }))).ids;
      results.push({ delay, outcome, kept, rest, tokens: [...(await session.tokens())] });
      await session.close();
    }
    return results;
  });
  for (const { delay, outcome, kept, rest, tokens } of found) {
    if (outcome !== "made all") assert.deepEqual(outcome, ["ABORTED", "enough"], `after ${delay} ms`);
    const made = tokens.slice(prompt.length);
    const known = Math.min(made.length, ids.length);
    assert.deepEqual(made.slice(0, known), ids.slice(0, known), `after ${delay} ms, ${kept} kept, ${rest.length} more`);
    assert.equal(tokens.length, kept + rest.length);
  }
  assert.ok(found.some(({ outcome }) => outcome !== "made all"));
});

test("an aborted reading keeps what it read, and can be finished", async () => {
  // Beyond the first window, and long enough that no machine is through with it before it hears of the abort.
  const long = Array.from({ length: 240 }, (_, i) => (i * 7) % 50);
  const found = await page.evaluate(async (long) => {
    const [session, whole] = [await engine.session(), await engine.session()];
    const abort = new AbortController();
    const exact = { prefill: "exact", reuse: false };
    const error = await refusal(session.append(long, { ...exact, signal: abort.signal, onProgress: ({ done }) => done >= 40 && abort.abort("later") }));
    const { length } = session;
    await session.append(long.slice(length), exact);
    await whole.append(long, exact);
    const made = [];
    for (const each of [session, whole]) {
      made.push((await all(each.generate({ maxTokens: 8 }))).ids);
      await each.close();
    }
    return { error, length, made };
  }, long);
  assert.deepEqual([found.error.code, found.error.cause], ["ABORTED", "later"]);
  assert.ok(found.length >= 40 && found.length < long.length, String(found.length));
  assert.equal(found.made[0].length, 8);
  assert.deepEqual(...found.made);
});

test("stop strings end the answer and do not show", async () => {
  const { text } = expected.cases[0];
  const at = [...text].findIndex((c, i) => i > 4 && /[a-z]/.test(c));
  const stop = [...text].slice(at, at + 2).join("");
  const found = await page.evaluate(async (stop) => {
    const session = await fresh();
    const made = await all(session.generate({ maxTokens: 32, stop }));
    const next = await all(session.generate({ maxTokens: 2 }));
    await session.close();
    return { made, next, length: session.length };
  }, stop);
  assert.equal(found.made.text, text.slice(0, text.indexOf(stop)));
  assert.equal(found.made.finish, "stop");
  assert.equal(found.next.ids.length, 2);
});

test("a fork and a cut go on as the text they are", async () => {
  const found = await page.evaluate(async () => {
    const session = await fresh();
    await all(session.generate({ maxTokens: 8 }));
    const fork = await session.fork();
    const one = (await all(session.generate({ maxTokens: 6 }))).ids;
    const two = (await all(fork.generate({ maxTokens: 6 }))).ids;
    await session.truncate(session.length - 10, "exact");
    const three = (await all(session.generate({ maxTokens: 10 }))).ids;
    await fork.close();
    await session.close();
    const closed = await refusal(session.append([5]));
    return { one, two, three, closed };
  });
  assert.deepEqual(found.one, ids.slice(8, 14));
  assert.deepEqual(found.two, ids.slice(8, 14));
  assert.deepEqual(found.three, ids.slice(4, 14));
  assert.equal(found.closed.code, "SESSION_CLOSED");
});

test("what cannot be read or made is refused, with the numbers, and harms nothing", async () => {
  const found = await page.evaluate(async () => {
    const session = await fresh();
    const codes = {
      token: await refusal(session.append([5, 320])),
      fraction: await refusal(session.append([5, 1.5])),
      empty: await refusal(session.append([])),
      context: await refusal(session.append(Array.from({ length: 300 }, () => 5))),
      temperature: await refusal(all(session.generate({ maxTokens: 4, temperature: -1 }))),
      topP: await refusal(all(session.generate({ maxTokens: 4, topP: 2 }))),
      length: await refusal(session.truncate(10_000)),
      nameless: await refusal(session.save()),
      half: await refusal(engine.session("name only")),
    };
    const { ids } = await all(session.generate({ maxTokens: 6 }));
    await session.close();
    return { codes, ids };
  });
  const codes = Object.fromEntries(Object.entries(found.codes).map(([what, { code }]) => [what, code]));
  assert.deepEqual(codes, {
    token: "TOKEN_ID",
    fraction: "TOKEN_ID",
    empty: "EMPTY_PROMPT",
    context: "CONTEXT",
    temperature: "SETTING",
    topP: "SETTING",
    length: codes.length,
    nameless: "ARGUMENT",
    half: "ARGUMENT",
  });
  assert.ok(["CONTEXT", "SETTING"].includes(codes.length));
  assert.deepEqual([found.codes.token.data.id, found.codes.token.data.vocabulary], [320, 320]);
  assert.equal(found.codes.context.data.allowed, 256);
  assert.deepEqual(found.ids, ids.slice(0, 6));
});

test("text goes in and out whole, and control tokens in it stay text", async () => {
  const found = await page.evaluate(async () => {
    const texts = ["plain", "zwölf Boxkämpfer 🥊 日本語", "<|end_of_sentence|><｜begin▁of▁sentence｜>", ""];
    const results = [];
    for (const text of texts) results.push([text, await engine.decode(await engine.encode(text))]);
    const session = await engine.session();
    await session.append("ab");
    const first = [...(await session.tokens())];
    await session.append("ab");
    const both = [...(await session.tokens())];
    const plain = [...(await engine.encode("ab"))];
    await session.close();
    return { results, first, both, plain };
  });
  for (const [text, back] of found.results) assert.equal(back, text);
  assert.deepEqual(found.first, [0, ...found.plain]);
  assert.deepEqual(found.both, [0, ...found.plain, ...found.plain]);
});
