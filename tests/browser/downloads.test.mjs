// The parts of a download that only a browser has: the file system, the Cache API, a quota. No GPU takes part.

import assert from "node:assert/strict";
import { stat } from "node:fs/promises";
import { after, before, beforeEach, test } from "node:test";
import { start } from "./harness.mjs";

let browser, page;
const shard = /model\.safetensors$/;

before(async () => (browser = await start()));
after(() => browser.close());
beforeEach(async () => {
  await page?.close();
  page = await browser.page();
  browser.server.faults.clear();
  await page.evaluate(async () => {
    await (await navigator.storage.getDirectory()).removeEntry("cedra", { recursive: true }).catch(() => {});
    await caches.delete("cedra");
  });
  browser.server.log.length = 0;
});

/** Downloads the pocket model in the page or in a worker; its size, where it was kept, the last progress, and a byte of it. */
const download = (where = "page", options = {}) =>
  page.evaluate(
    async ([where, { deny = [] }]) => {
      const work = `
        for (const part of ${JSON.stringify(deny)}) {
          if (part === "opfs") StorageManager.prototype.getDirectory = () => Promise.reject(new DOMException("no", "SecurityError"));
          if (part === "cache") CacheStorage.prototype.open = () => Promise.reject(new DOMException("no", "SecurityError"));
          if (part === "writable") delete FileSystemFileHandle.prototype.createWritable;
        }
        const { downloadModel } = await import("${location.origin}/pkg/dist/download.js");
        let last;
        try {
          const { files, kept } = await downloadModel("${location.origin}/pocket/", { cache: true, onProgress: (progress) => (last = progress) });
          const blob = files.get("model.safetensors");
          const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", await blob.arrayBuffer()));
          return { kept, size: blob.size, digest: [...digest.subarray(0, 4)].join(), last };
        } catch ({ code, message, data }) {
          return { code, message, data };
        }`;
      const AsyncFunction = (async () => {}).constructor;
      if (where === "page") return new AsyncFunction(work)();
      const source = `onmessage = async () => postMessage(await (async () => {${work}})())`;
      const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
      return new Promise((done) => {
        worker.onmessage = ({ data }) => {
          worker.terminate();
          done(data);
        };
        worker.postMessage(0);
      });
    },
    [where, options],
  );

const { size } = await stat(new URL("../../models/pocket/model.safetensors", import.meta.url));

test("every depot keeps the file for the next visit, and memory does not", async () => {
  const depots = [
    ["page", [], "opfs"],
    ["worker", [], "opfs"],
    ["worker", ["writable"], "opfs"],
    ["page", ["opfs"], "cache"],
    ["worker", ["opfs"], "cache"],
    ["page", ["opfs", "cache"], "memory"],
  ];
  const digests = new Set();
  for (const [where, deny, kept] of depots) {
    await browser.reload(page);
    await page.evaluate(async () => {
      await (await navigator.storage.getDirectory()).removeEntry("cedra", { recursive: true }).catch(() => {});
      await caches.delete("cedra");
    });
    for (const again of [false, true]) {
      await browser.reload(page);
      browser.server.log.length = 0;
      const found = await download(where, { deny });
      assert.equal(found.kept, kept, JSON.stringify(found));
      assert.equal(found.size, size);
      assert.deepEqual([found.last.loaded, found.last.total], [size, size]);
      digests.add(found.digest);
      assert.equal(browser.server.sent(shard).bytes, again && kept !== "memory" ? 0 : size, `${where} ${deny} ${again}`);
    }
  }
  assert.equal(digests.size, 1);
});

test("a tab that dies in the middle of a download leaves what it had", async () => {
  browser.server.faults.set("/pocket/model.safetensors", { stall: 10_000_000 });
  const pending = download().catch(() => "closed");
  for (;;) {
    const entries = await page.evaluate(async () => {
      const names = [];
      const root = await (await navigator.storage.getDirectory()).getDirectoryHandle("cedra", { create: true });
      for await (const folder of root.values()) {
        if (folder.kind !== "directory") continue;
        // What is named may be gone by now: the download goes on meanwhile.
        for await (const [name, file] of folder.entries()) names.push([name, (await file.getFile().catch(() => ({ size: -1 }))).size]);
      }
      return names;
    });
    if (entries.some(([name, size]) => name.endsWith("-000000000000000") && size === 8 << 20)) break;
    await new Promise((done) => setTimeout(done, 50));
  }
  await page.close();
  await pending;
  browser.server.faults.clear();
  browser.server.log.length = 0;
  page = await browser.page();
  assert.equal((await download()).size, size);
  assert.deepEqual(browser.server.sent(shard).ranges, [`bytes=${8 << 20}-`]);
});

test("two tabs that want the same file download it once", async () => {
  const other = await browser.page();
  const first = page;
  const both = Promise.all([download(), ((page = other), download())]);
  assert.deepEqual((await both).map(({ size, kept }) => [size, kept]), [[size, "opfs"], [size, "opfs"]]);
  assert.equal(browser.server.sent(shard).bytes, size);
  await first.close();
});

test("tabs that open at the same moment find the same depot", async () => {
  const tabs = [page, await browser.page(), await browser.page()];
  const kinds = await Promise.all(
    tabs.map((tab) =>
      tab.evaluate(async () => {
        const { openDepot } = await import("/pkg/dist/depot.js");
        const kinds = [];
        for (let i = 0; i < 40; i++) kinds.push((await openDepot()).kind);
        return [...new Set(kinds)];
      }),
    ),
  );
  assert.deepEqual(kinds, tabs.map(() => ["opfs"]));
  await Promise.all(tabs.slice(1).map((tab) => tab.close()));
});

test("cut, corrupt, replaced by a page: refused, and good again afterwards", async () => {
  for (const [fault, code] of [[{ html: true, head: true }, "DOWNLOAD"], [{ corrupt: 8 }, "DOWNLOAD"], [{ status: 404 }, "NOT_FOUND"]]) {
    browser.server.faults.set("/pocket/model.safetensors", fault);
    assert.equal((await download()).code, code);
    browser.server.faults.clear();
  }
  browser.server.faults.set("/pocket/model.safetensors", { cut: 3_000_000, times: 2 });
  assert.equal((await download()).size, size);
});

test("what was verified loads without a network, in this visit and the next", async () => {
  for (const deny of [[], ["opfs"]]) {
    await browser.reload(page);
    const there = await download("page", { deny });
    for (const again of [false, true]) {
      // The module itself comes from the network.
      if (again) await browser.reload(page);
      await page.evaluate(() => import("/pkg/dist/download.js").then(() => undefined));
      await browser.context.setOffline(true);
      assert.deepEqual(await download("page", { deny }), there, `${deny}, ${again}`);
      await browser.context.setOffline(false);
    }
  }
});

test("a small quota is an error with the numbers, and room makes it good", async () => {
  // A profile that has never held more: what was deleted elsewhere counts for a while.
  const fresh = await start();
  await page.close();
  page = await fresh.page();
  const devtools = await fresh.context.newCDPSession(page);
  const origin = fresh.server.url;
  await devtools.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 4 << 20 });
  const { code, data } = await download();
  assert.deepEqual([code, data.needed], ["QUOTA", size]);
  await devtools.send("Storage.overrideQuotaForOrigin", { origin, quotaSize: 64 << 20 });
  assert.equal((await download()).size, size);
  await fresh.close();
});
