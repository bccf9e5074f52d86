// Saving while an answer is made, into stores that are full, shared, cut off and killed, and as large as they get.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { expected, start } from "./harness.mjs";

let browser, page;
const { prompt, ids } = expected.cases[0];

before(async () => {
  browser = await start();
  page = await tab();
});
after(() => browser.close());

/** A tab with an engine in its worker. */
const tab = async (from = browser) => prepared(await from.page());
const prepared = async (tab) => {
  await tab.evaluate(async () => {
    globalThis.engine = await load();
    globalThis.open = async (name, database) => (globalThis.session = await engine.session(name, { store: idb(database) }));
  });
  return tab;
};

/** The session as another engine finds it: its tokens, and the next few. */
const found = (tab, name, database, next) =>
  tab.evaluate(
    async ([name, database, next]) => {
      const session = await open(name, database);
      const { length, persisted, replayed } = session;
      const tokens = [...(await session.tokens())];
      const made = next > 0 ? (await all(session.generate({ maxTokens: next }))).ids : [];
      await session.close();
      return { length, persisted, replayed, tokens, made };
    },
    [name, database, next],
  );

test("a save in the middle of an answer is that moment, and disturbs it nowhere", async () => {
  const made = await page.evaluate(async (prompt) => {
    const session = await open("middle", "middle");
    await session.append(prompt, { prefill: "exact" });
    const answer = session.generate({ maxTokens: 20 });
    const [seen, pieces] = [[], []];
    let save;
    for await (const piece of answer) {
      seen.push(...piece.ids);
      // Not awaited: the loop goes on while it is written.
      if (seen.length >= 5 && !save) save = session.save({ rings: "saved" }).then(({ tokens }) => ({ tokens, seen: seen.length }));
    }
    const saved = await save;
    const out = { seen, saved, finish: answer.finish, length: session.length, persisted: session.persisted };
    await session.close();
    return out;
  }, prompt);
  assert.deepEqual(made.seen, ids.slice(0, 20));
  assert.deepEqual([made.finish, made.length], ["length", prompt.length + 20]);
  assert.equal(made.persisted, made.saved.tokens === made.length);
  assert.ok(made.saved.tokens >= prompt.length + 5, JSON.stringify(made.saved));
  await prepared(await browser.reload(page));
  const opened = await found(page, "middle", "middle", 5);
  const ahead = made.saved.tokens - prompt.length;
  assert.deepEqual(opened.tokens, [...prompt, ...ids.slice(0, ahead)]);
  assert.deepEqual([opened.made, opened.replayed, opened.persisted], [ids.slice(ahead, ahead + 5), 0, true]);
});

test("a save after every piece, awaited or not, and the answer is the same", async () => {
  const made = await page.evaluate(async (prompt) => {
    const session = await open("often", "often");
    await session.append(prompt, { prefill: "exact" });
    const before = await engine.counters();
    const [seen, saves] = [[], []];
    for await (const piece of session.generate({ maxTokens: 26 })) {
      seen.push(...piece.ids);
      const save = session.save({ rings: "saved" });
      saves.push(save.then(({ tokens }) => tokens));
      if (seen.length % 3 === 0) await save;
    }
    const counters = await engine.counters();
    const tokens = await Promise.all(saves);
    await session.save();
    const out = { seen, tokens, persisted: session.persisted, blocking: counters.blockingReadbacks - before.blockingReadbacks };
    await session.close();
    return out;
  }, prompt);
  assert.deepEqual(made.seen, ids.slice(0, 26));
  assert.ok(made.tokens.length >= 20, `${made.tokens.length} saves`);
  assert.ok(made.tokens.every((tokens, i) => tokens > prompt.length && tokens >= (made.tokens[i - 1] ?? 0)), made.tokens.join());
  assert.deepEqual([made.persisted, made.blocking], [true, 0]);
  assert.deepEqual((await found(page, "often", "often", 0)).tokens, [...prompt, ...ids.slice(0, 26)]);
});

test("calls after a save come after it; what is closed is saved first", async () => {
  const made = await page.evaluate(async (prompt) => {
    const session = await open("order", "order");
    await session.append(prompt);
    const [first, second] = [session.save(), session.save()];
    const cut = session.truncate(2);
    const tokens = (await first).tokens;
    await cut;
    const third = session.save();
    await session.close();
    return [tokens, (await second).tokens, (await third).tokens, (await refusal(session.save())).code];
  }, prompt);
  assert.ok(made[0] === prompt.length && [prompt.length, 2].includes(made[1]), made.join());
  assert.deepEqual(made.slice(2), [2, "SESSION_CLOSED"]);
  assert.deepEqual((await found(page, "order", "order", 0)).tokens, prompt.slice(0, 2));
});

test("a store without room refuses with the numbers while the answer goes on, and takes the text once there is room", async (t) => {
  const fresh = await start();
  t.after(() => fresh.close());
  const full = await fresh.page();
  await full.evaluate(async () => (globalThis.engine = await load({ cache: false })));
  // Before the database is there: of one in use the browser remembers for half a minute how much was left.
  const devtools = await fresh.context.newCDPSession(full);
  const { url: origin } = fresh.server;
  await devtools.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 10_000 });
  await full.evaluate(async (prompt) => {
    globalThis.session = await engine.session("big", { store: idb("full") });
    await session.append(prompt, { prefill: "exact" });
  }, prompt);
  const made = await full.evaluate(async () => {
    const [seen, errors] = [[], []];
    const told = () => [session.persisted, session.storeError?.code];
    let during;
    for await (const piece of session.generate({ maxTokens: 12 })) {
      seen.push(...piece.ids);
      if (seen.length % 4 === 0) errors.push(await refusal(session.save({ rings: "saved" })));
      during ??= errors.length > 0 ? told() : undefined;
    }
    return { seen, errors, during, after: told(), usage: await engine.usage(idb("full")) };
  });
  assert.deepEqual(made.seen, ids.slice(0, 12));
  assert.deepEqual([made.during, made.after], [[false, "QUOTA"], [false, "QUOTA"]]);
  assert.ok(made.errors.length >= 2);
  for (const { code, data } of made.errors) {
    assert.equal(code, "QUOTA");
    // This browser's estimate is a fixed number, not what is left: then nothing is said.
    assert.ok(data.needed > 20_000 && (data.available === null || data.available < data.needed), JSON.stringify(data));
  }
  assert.deepEqual([made.usage.sessions, made.usage.records], [0, 0]);
  await devtools.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 64 << 20 });
  const saved = await full.evaluate(async () => {
    const { tokens } = await session.save({ rings: "saved" });
    const out = [tokens, session.persisted, session.storeError];
    await session.close();
    return out;
  });
  assert.deepEqual(saved, [prompt.length + 12, true, undefined]);
  const again = await tab(fresh);
  assert.deepEqual((await found(again, "big", "full", 4)).made, ids.slice(12, 16));
});

test("two tabs that save the same records and forget them again get on", async () => {
  const other = await tab();
  // Short texts have no complete page, yet the records of their ends are the same, and go with each delete.
  const work = ([prompt, name]) =>
    (async () => {
      const trunk = await engine.session();
      await trunk.append(prompt);
      const store = idb("shared");
      const seen = [];
      for (let i = 0; i < 25; i++) {
        const fork = await trunk.fork();
        const { tokens } = await fork.save({ name, store, rings: "saved" });
        await fork.close();
        seen.push(tokens);
        if (i % 2 === 1) await engine.delete(name, { store });
      }
      return seen;
    })();
  const [a, b] = await Promise.all([page.evaluate(work, [prompt, "a"]), other.evaluate(work, [prompt, "b"])]);
  assert.deepEqual([...a, ...b], Array.from({ length: 50 }, () => prompt.length));
  for (const name of ["a", "b"]) assert.deepEqual((await found(page, name, "shared", 0)).tokens, prompt);
  await other.close();
});

test("records that another tab lets go of before the commit are written again", async () => {
  const here = await browser.page();
  const made = await here.evaluate(async (prompt) => {
    const engine = await load({ worker: false });
    const session = await engine.session("lost", { store: idb("lost") });
    await session.append(prompt);
    // Right before a commit, in the order of the database's transactions: what another tab's commit does to records that it alone named.
    let losses = 0;
    const real = IDBDatabase.prototype.transaction;
    IDBDatabase.prototype.transaction = function (stores, mode, options) {
      if (options?.durability === "strict" && losses < 2) {
        losses++;
        const theirs = real.call(this, ["records", "sizes"], "readwrite");
        for (const store of ["records", "sizes"]) theirs.objectStore(store).clear();
      }
      return real.call(this, stores, mode, options);
    };
    const { records } = await session.save();
    IDBDatabase.prototype.transaction = real;
    const out = { losses, records, persisted: session.persisted };
    await session.close();
    const again = await engine.session("lost", { store: idb("lost") });
    out.tokens = [...(await again.tokens())];
    engine.close();
    return out;
  }, prompt);
  assert.deepEqual([made.losses, made.persisted, made.tokens], [2, true, prompt]);
  assert.ok(made.records > 0);
  await here.close();
});

test("a connection that is cut off is made anew", async () => {
  const here = await browser.page();
  const devtools = await browser.context.newCDPSession(here);
  await here.evaluate(async (prompt) => {
    globalThis.engine = await load({ worker: false });
    globalThis.session = await engine.session("stale", { store: idb("stale") });
    await session.append(prompt);
    await session.save();
  }, prompt);
  // Another tab deletes the database: this one's connection gives way, and its next save finds nothing of what it has saved.
  const other = await browser.page();
  await other.evaluate(
    () =>
      new Promise((done, fail) => {
        const request = indexedDB.deleteDatabase("stale");
        request.onsuccess = done;
        request.onblocked = request.onerror = () => fail(new Error("not deleted"));
      }),
  );
  const save = () => here.evaluate(async () => [(await session.save()).records > 0, session.persisted]);
  assert.deepEqual(await save(), [true, true]);
  // The browser clears the site's data: it closes the connection from its side.
  const { url: origin } = browser.server;
  await devtools.send("Storage.clearDataForOrigin", { origin, storageTypes: "indexeddb" });
  assert.deepEqual(await save(), [true, true]);
  // A connection that is closed and does not know it.
  const states = await here.evaluate(async () => {
    const real = IDBDatabase.prototype.transaction;
    let throws = 1;
    IDBDatabase.prototype.transaction = function (...args) {
      if (throws-- > 0) this.close();
      return real.apply(this, args);
    };
    await session.append([5]);
    await session.save();
    const once = session.persisted;
    throws = 2;
    const twice = (await refusal(session.save())).code;
    IDBDatabase.prototype.transaction = real;
    await session.save();
    const out = [once, twice, session.persisted, session.storeError];
    await session.close();
    return out;
  });
  assert.deepEqual(states, [true, "STORE", true, undefined]);
  const opened = await here.evaluate(async () => {
    const session = await engine.session("stale", { store: idb("stale") });
    const tokens = [...(await session.tokens())];
    engine.close();
    return tokens;
  });
  assert.deepEqual(opened, [...prompt, 5]);
  await other.close();
  await here.close();
});

test("a browser that is killed while it saves has the last commit that was heard of, or one after it", async (t) => {
  const own = await start();
  t.after(() => own.close());
  const kills = [];
  let victim = await tab(own);
  for (let kill = 0; kill < Number(process.env.CEDRA_KILLS ?? 1); kill++) {
    const [commits, enough] = [[], 2 + 3 * (kill % 4)];
    // Once there are enough, the page hears nothing more: the save after is under way, and the answer gets no further than that and the few
    // tokens that the engine is ahead.
    await victim.exposeFunction("committed", (tokens) => commits.push(tokens) < enough || new Promise(() => {}));
    await victim.evaluate(async (prompt) => {
      // Each time from the beginning: the prompt, and what the model makes of it, so that any commit can be told from a mix.
      await engine.delete("killed", { store: idb("killed") });
      const session = await open("killed", "killed");
      await session.append(prompt, { prefill: "exact" });
      await committed((await session.save()).tokens);
      (async () => {
        let [before, last] = [];
        for await (const _ of session.generate({ maxTokens: 28 })) {
          [before, last] = [last, session.save({ rings: "saved" }).then(({ tokens }) => committed(tokens))];
          await before;
        }
      })().catch(() => {});
    }, prompt);
    await own.kill(async () => {
      const begun = Date.now();
      while (commits.length < enough && Date.now() - begun < 60_000) await new Promise((done) => setTimeout(done, 1));
    });
    victim = await tab(own);
    const opened = await found(victim, "killed", "killed", 4);
    const ahead = opened.length - prompt.length;
    kills.push({ commits: commits.length, last: commits.at(-1), opened: opened.length });
    assert.ok(commits.length >= enough && opened.length >= commits.at(-1) && ahead < 28, JSON.stringify(kills));
    assert.deepEqual(opened.tokens, [...prompt, ...ids.slice(0, ahead)]);
    assert.deepEqual(opened.made, ids.slice(ahead, ahead + 4));
    const usage = await victim.evaluate(() => engine.usage(idb("killed")));
    assert.deepEqual([usage.sessions, usage.records <= 3], [1, true], "nothing is left of the save that was cut off");
  }
  console.log(`kills: ${JSON.stringify(kills)}`);
});

test("a browser that is killed inside a transaction has the commit before it, and nothing of the one that was cut off", async (t) => {
  const own = await start();
  t.after(() => own.close());
  const records = (page) =>
    page.evaluate(
      () =>
        new Promise((done, fail) => {
          const request = indexedDB.open("inside");
          request.onerror = fail;
          request.onsuccess = ({ target: { result: database } }) => {
            database.transaction("records").objectStore("records").count().onsuccess = ({ target }) => done(target.result);
            database.close();
          };
        }),
    );
  // While bytes are written, and while they are given their name: then they are all there, and belong to nothing.
  for (const store of ["records", "sessions"]) {
    const victim = await own.page();
    let inside;
    const moment = new Promise((done) => (inside = done));
    await victim.exposeFunction("inside", inside);
    const kept = await victim.evaluate(async (prompt) => {
      globalThis.engine = await load({ worker: false });
      globalThis.session = await engine.session("inside", { store: idb("inside") });
      if (session.length === 0) await session.append(prompt, { prefill: "exact" });
      return (await session.save()).tokens;
    }, prompt);
    const named = await records(victim);
    await victim.evaluate(async (name) => {
      await all(session.generate({ maxTokens: 6 }));
      const { put } = IDBObjectStore.prototype;
      IDBObjectStore.prototype.put = function (...args) {
        const request = put.apply(this, args);
        if (this.name === name) {
          // A transaction lives for as long as something is asked of it.
          const ask = () => (this.get("nothing").onsuccess = ask);
          ask();
          globalThis.inside("held");
        }
        return request;
      };
      session.save({ rings: "saved" }).then(() => globalThis.inside("saved"), (error) => globalThis.inside(String(error)));
    }, store);
    await own.kill(() => moment);
    assert.equal(await moment, "held");
    const again = await own.page();
    const left = await records(again);
    assert.ok(store === "records" ? left === named : left > named, `${left} records, ${named} of them named`);
    await prepared(again);
    const opened = await found(again, "inside", "inside", 4);
    const ahead = kept - prompt.length;
    assert.deepEqual([opened.length, opened.tokens], [kept, [...prompt, ...ids.slice(0, ahead)]]);
    assert.deepEqual(opened.made, ids.slice(ahead, ahead + 4));
    assert.equal(await records(again), named, "nothing is left of it");
    await again.close();
  }
});

test("300 MB are saved and come back, in records of 8 MiB at most", async (t) => {
  const own = await start();
  t.after(() => own.close());
  const pages = 1200;
  const work = async ([call, pages]) => {
    const wasm = await import("/wasm-tests/cedra.js");
    const { memory } = await wasm.default();
    const began = performance.now();
    const result = await wasm[call]("large", pages);
    return { ...result, seconds: (performance.now() - began) / 1000, wasm: memory.buffer.byteLength };
  };
  /** Runs it in a tab of its own, and watches the browser's memory. */
  const watched = async (call) => {
    const tab = await own.page();
    tab.setDefaultTimeout(600_000);
    let [most, ended] = [await own.memory(), false];
    const before = most;
    const done = tab.evaluate(work, [call, pages]).finally(() => (ended = true));
    while (!ended) {
      most = Math.max(most, await own.memory());
      await Promise.race([done.catch(() => {}), new Promise((next) => setTimeout(next, 500))]);
    }
    const result = { ...(await done), browser: most - before };
    const mega = (bytes) => (bytes / 1e6).toFixed(0);
    console.log(`${call}: ${result.seconds.toFixed(1)} s, wasm ${mega(result.wasm)} MB, the browser's processes ${mega(result.browser)} MB more`);
    return { result, tab };
  };
  const { result: saved, tab: writer } = await watched("saveSynthetic");
  assert.equal(saved.pages, pages);
  assert.ok(saved.bytes > 300e6 && saved.wasm < 128e6, JSON.stringify(saved));
  const sizes = await writer.evaluate(
    () =>
      new Promise((done) => {
        indexedDB.open("large").onsuccess = ({ target: { result: database } }) => {
          database.transaction("sizes").objectStore("sizes").getAll().onsuccess = ({ target }) => done(target.result);
        };
      }),
  );
  assert.equal(sizes.length, saved.records);
  assert.ok(Math.max(...sizes) <= 8 << 20, `${Math.max(...sizes)} bytes`);
  await own.restart();
  const { result: compared } = await watched("compareSynthetic");
  assert.deepEqual([compared.pages, compared.whole], [pages, true]);
  assert.ok(compared.wasm < 128e6, JSON.stringify(compared));
});
