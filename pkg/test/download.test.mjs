import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { after, before, beforeEach, test } from "node:test";
import { serve } from "../../tests/browser/server.mjs";
import { folderOf, MemoryDepot } from "../dist/depot.js";
import { Download } from "../dist/download.js";

const MIB = 1 << 20;
const files = new Map();
let server;

const safetensors = (bytes) => {
  const header = Buffer.from(JSON.stringify({ __metadata__: {}, w: { dtype: "U8", shape: [bytes], data_offsets: [0, bytes] } }));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(header.length));
  return Buffer.concat([length, header, randomBytes(bytes)]);
};
const sum = (bytes) => createHash("sha256").update(bytes).digest("hex");
const path = (name) => `/m/${name}`;
const shardFolder = () => folderOf(`${server.url}/m/model.safetensors`);
const isShard = /safetensors$/;
const INDEX = "model.safetensors.index.json";

/** Loads the folder with waits that take no time. */
const load = async (depot, options = {}) => new Download(`${server.url}/m/`, depot, options, async () => {}).model();
const refusal = (depot, options) => load(depot, options).then(() => assert.fail("it loaded"), (thrown) => thrown);
const same = async (blob, bytes) => assert.ok(Buffer.from(await blob.arrayBuffer()).equals(bytes));

before(async () => (server = await serve({ "/m/": files })));
after(() => server.close());
beforeEach(() => {
  files.clear();
  files.set("config.json", Buffer.from("{}")).set("tokenizer.json", Buffer.from("[]")).set("model.safetensors", safetensors(20 * MIB + 17));
  server.faults.clear();
  server.log.length = 0;
});

test("a folder comes once, byte for byte, and then from the depot", async () => {
  const depot = new MemoryDepot();
  const heard = [];
  const first = await load(depot, { onProgress: (progress) => heard.push(progress) });
  assert.deepEqual([...first.keys()], ["config.json", "tokenizer.json", "model.safetensors"]);
  await same(first.get("model.safetensors"), files.get("model.safetensors"));
  const size = files.get("model.safetensors").length;
  assert.deepEqual(heard.at(-1), { stage: "download", file: "model.safetensors", loaded: size, total: size });
  assert.ok(heard.every(({ loaded, total }, i) => total === size && loaded >= (heard[i - 1]?.loaded ?? 0)));
  server.log.length = 0;
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
  assert.equal(server.sent(isShard).requests, 0);
});

test("shards of an index, and no way out of the folder", async () => {
  const shards = { "a-1.safetensors": safetensors(1000), "a-2.safetensors": safetensors(77) };
  for (const [name, bytes] of Object.entries(shards)) files.set(name, bytes);
  const index = (map) => files.set("model.safetensors.index.json", Buffer.from(JSON.stringify({ weight_map: map })));
  index({ x: "a-2.safetensors", y: "a-1.safetensors", z: "a-2.safetensors" });
  const loaded = await load(new MemoryDepot());
  for (const [name, bytes] of Object.entries(shards)) await same(loaded.get(name), bytes);
  assert.ok(!loaded.has("model.safetensors"));
  for (const bad of ["../a-1.safetensors", "http://elsewhere/a.safetensors", "a.bin"]) {
    index({ x: bad });
    assert.equal((await refusal(new MemoryDepot())).code, "MALFORMED");
  }
});

test("a cut download goes on where it was cut", async () => {
  for (const cut of [0, 5, 1000, 8 * MIB, 9 * MIB + 3, 20 * MIB]) {
    const depot = new MemoryDepot();
    server.log.length = 0;
    server.faults.set(path("model.safetensors"), { cut, times: 1 });
    await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
    const { bytes, requests } = server.sent(isShard);
    assert.equal(requests, 2);
    assert.equal(bytes, files.get("model.safetensors").length, `cut after ${cut}`);
  }
});

test("what a given-up download has left is used by the next visit", async () => {
  const depot = new MemoryDepot();
  server.faults.set(path("model.safetensors"), { cut: 3 * MIB });
  const abort = new AbortController();
  const onProgress = ({ loaded }) => loaded >= 6 * MIB && abort.abort("closed");
  const error = await refusal(depot, { signal: abort.signal, onProgress });
  assert.deepEqual([error.code, error.cause], ["ABORTED", "closed"]);
  server.faults.clear();
  server.log.length = 0;
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
  const { bytes, ranges } = server.sent(isShard);
  assert.equal(ranges.length, 1);
  assert.match(ranges[0], /^bytes=\d+-$/);
  assert.ok(bytes <= 18 * MIB, `${bytes} bytes`);
});

test("a part with a hole counts up to the hole", async () => {
  const depot = new MemoryDepot();
  server.faults.set(path("model.safetensors"), { cut: 20 * MIB });
  const abort = new AbortController();
  await refusal(depot, { signal: abort.signal, onProgress: ({ loaded }) => loaded >= 19 * MIB && abort.abort() });
  await depot.remove(shardFolder(), [...(await depot.list(shardFolder())).keys()].sort()[1]);
  server.faults.clear();
  server.log.length = 0;
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
  assert.deepEqual(server.sent(isShard).ranges, [`bytes=${8 * MIB}-`]);
});

test("a hash that is published later is held against the kept file too", async () => {
  const depot = new MemoryDepot();
  await load(depot);
  files.set("checksums.json", Buffer.from(JSON.stringify({ "model.safetensors": "0".repeat(64) })));
  assert.equal((await refusal(depot)).code, "DOWNLOAD");
});

test("a server that only ever cuts is an error with the numbers", async () => {
  server.faults.set(path("model.safetensors"), { cut: 0 });
  const error = await refusal(new MemoryDepot());
  assert.deepEqual([error.code, error.data.received, error.data.expected], ["DOWNLOAD", 0, files.get("model.safetensors").length]);
});

test("a page, a refusal, a corrupt or a short file is never kept", async () => {
  const bytes = files.get("model.safetensors");
  files.set("checksums.json", Buffer.from(JSON.stringify({ "model.safetensors": sum(bytes) })));
  const bad = {
    html: [{ html: true }, "DOWNLOAD"],
    "html behind HEAD too": [{ html: true, head: true }, "DOWNLOAD"],
    gone: [{ status: 404 }, "NOT_FOUND"],
    refused: [{ status: 403 }, "DOWNLOAD"],
    overloaded: [{ status: 503 }, "DOWNLOAD"],
    "corrupt header": [{ corrupt: 8 }, "DOWNLOAD"],
    "corrupt weight": [{ corrupt: 12 * MIB }, "DOWNLOAD"],
  };
  for (const [what, [fault, code]] of Object.entries(bad)) {
    const depot = new MemoryDepot();
    server.faults.set(path("model.safetensors"), fault);
    const error = await refusal(depot);
    assert.equal(error.code, code, what);
    assert.equal(error.data.file, "model.safetensors");
    assert.deepEqual([...(await depot.list(shardFolder())).keys()], [], `${what}: what is left`);
    server.faults.clear();
    await same((await load(depot)).get("model.safetensors"), bytes);
  }
});

test("a file as long as another but not the one in checksums.json is refused", async () => {
  files.set("checksums.json", Buffer.from(JSON.stringify({ "model.safetensors": "0".repeat(64) })));
  const error = await refusal(new MemoryDepot());
  assert.deepEqual([error.code, error.data.found, error.data.expected], ["DOWNLOAD", sum(files.get("model.safetensors")), "0".repeat(64)]);
});

test("a server without ranges is asked for everything again", async () => {
  const depot = new MemoryDepot();
  server.faults.set(path("model.safetensors"), { cut: MIB, times: 1 });
  const abort = new AbortController();
  await refusal(depot, { signal: abort.signal, onProgress: ({ loaded }) => loaded >= MIB / 2 && abort.abort() });
  server.faults.set(path("model.safetensors"), { ranges: false });
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
});

test("another version replaces the kept one and never mixes with a part of it", async () => {
  const depot = new MemoryDepot();
  server.faults.set(path("model.safetensors"), { cut: 10 * MIB, times: 1 });
  const abort = new AbortController();
  await refusal(depot, { signal: abort.signal, onProgress: ({ loaded }) => loaded >= 9 * MIB && abort.abort() });
  files.set("model.safetensors", safetensors(20 * MIB + 17));
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
  files.set("model.safetensors", safetensors(12 * MIB));
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
});

test("without network, or with a page instead of it, the kept files serve", async () => {
  const depot = new MemoryDepot();
  await load(depot);
  for (const fault of [{ status: 503, head: true }, { html: true, head: true }, { cut: 0, head: true }]) {
    for (const name of [...files.keys(), INDEX, "checksums.json"]) server.faults.set(path(name), fault);
    await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
  }
  assert.equal((await refusal(new MemoryDepot())).code, "DOWNLOAD");
});

test("without network, a file is missing where it was missing last", async () => {
  const depot = new MemoryDepot();
  const away = () => [...files.keys(), "tokenizer.json", INDEX, "checksums.json"].forEach((name) => server.faults.set(path(name), { status: 503, head: true }));
  files.set("a.safetensors", safetensors(99));
  // Nothing was loaded yet: nobody knows what there is.
  const config = path("config.json");
  server.faults.set(config, { status: 404 });
  assert.equal((await refusal(depot)).code, "NOT_FOUND");
  away();
  assert.equal((await refusal(depot)).code, "DOWNLOAD");
  for (const shards of [undefined, { x: "a.safetensors" }, undefined]) {
    server.faults.clear();
    if (shards) files.set(INDEX, Buffer.from(JSON.stringify({ weight_map: shards })));
    else files.delete(INDEX);
    const names = [...(await load(depot)).keys()];
    assert.equal(names.at(-1), shards ? "a.safetensors" : "model.safetensors");
    away();
    assert.deepEqual([...(await load(depot)).keys()], names);
  }
});

test("kept pieces that got lost or cut are fetched again", async () => {
  const depot = new MemoryDepot();
  await load(depot);
  const folder = shardFolder();
  const pieces = [...(await depot.list(folder)).keys()].filter((name) => name !== "seal.json").sort();
  await depot.remove(folder, pieces[1]);
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
  await depot.write(folder, pieces[2], new Uint8Array(5));
  await same((await load(depot)).get("model.safetensors"), files.get("model.safetensors"));
});

test("a full disk tells what was needed", async () => {
  const depot = new MemoryDepot();
  const write = depot.write.bind(depot);
  depot.write = async (folder, entry, bytes) => {
    if (bytes.length > MIB) throw new DOMException("full", "QuotaExceededError");
    return write(folder, entry, bytes);
  };
  const error = await refusal(depot);
  assert.deepEqual([error.code, error.data.needed], ["QUOTA", files.get("model.safetensors").length]);
});
