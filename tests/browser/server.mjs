// A static server with ranges and ETags that can be told to misbehave, and that remembers what it has sent.

import { createHash } from "node:crypto";
import { readFile, stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";

const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".mjs": "text/javascript",
  ".json": "application/json",
  ".css": "text/css",
  ".svg": "image/svg+xml",
  ".txt": "text/plain; charset=utf-8",
  ".wasm": "application/wasm",
  ".webmanifest": "application/manifest+json",
  ".woff2": "font/woff2",
};

/**
 * Serves `mounts`, a map from a prefix of paths to a folder or to a map from names to bytes. A path of a folder has its `index.html`.
 *
 * `faults` maps a path to how it fails: `{ cut: bytes }` sends that many bytes and hangs up, `{ html: true }` answers 200 with
 * a page, `{ corrupt: offset }` turns the bits of one byte, `{ status }` refuses, `{ ranges: false }` sends everything whatever
 * was asked for, `{ stall: bytes }` sends that many bytes and no more. `times` counts how often (default: for ever); a fault holds
 * for GET only, unless `head` is true.
 */
export async function serve(mounts) {
  const faults = new Map();
  const log = [];

  const bytesOf = async (path) => {
    for (const [prefix, mount] of Object.entries(mounts)) {
      if (!path.startsWith(prefix)) continue;
      const name = normalize(path.slice(prefix.length));
      if (name.startsWith("..")) return undefined;
      if (mount instanceof Map) return mount.get(name);
      const file = join(mount, path.endsWith("/") ? join(name, "index.html") : name);
      if (await stat(file).then((found) => found.isFile(), () => false)) return readFile(file);
    }
    return undefined;
  };

  const answer = async (request, response) => {
    const path = decodeURIComponent(new URL(request.url, "http://localhost").pathname);
    const head = request.method === "HEAD";
    const entry = { method: request.method, path, range: request.headers.range, status: 0, bytes: 0 };
    log.push(entry);
    const send = (status, headers, body) => {
      entry.status = status;
      response.writeHead(status, { "cache-control": "no-cache", ...headers, "content-length": body.length });
      if (head) return response.end();
      entry.bytes = body.length;
      response.end(body);
    };

    let fault = faults.get(path);
    if (fault && head && !fault.head) fault = undefined;
    if (fault?.times !== undefined && --fault.times <= 0) faults.delete(path);
    if (fault?.status) return send(fault.status, { "content-type": "text/plain" }, Buffer.from("no"));
    if (fault?.html) return send(200, { "content-type": "text/html" }, Buffer.from("<!doctype html><title>Sign in</title>"));

    const whole = await bytesOf(path);
    if (!whole) return send(404, { "content-type": "text/plain" }, Buffer.from("not found"));
    const headers = {
      "content-type": TYPES[path.endsWith("/") ? ".html" : extname(path)] ?? "application/octet-stream",
      "accept-ranges": "bytes",
      etag: `"${createHash("sha256").update(whole).digest("hex").slice(0, 16)}"`,
    };
    if (request.headers["if-none-match"] === headers.etag) {
      entry.status = 304;
      response.writeHead(304, { etag: headers.etag, "cache-control": "no-cache" });
      return response.end();
    }
    let body = whole;
    let status = 200;
    const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? "");
    if (range && fault?.ranges !== false) {
      const start = Number(range[1]);
      const end = Math.min(range[2] ? Number(range[2]) : Infinity, whole.length - 1);
      if (start > end) return send(416, { "content-range": `bytes */${whole.length}` }, Buffer.alloc(0));
      body = whole.subarray(start, end + 1);
      status = 206;
      headers["content-range"] = `bytes ${start}-${end}/${whole.length}`;
    }
    if (fault?.corrupt !== undefined) {
      body = Buffer.from(body);
      body[fault.corrupt] ^= 0xff;
    }
    const limit = fault?.cut ?? fault?.stall;
    if (limit === undefined || head) return send(status, headers, body);
    entry.status = status;
    entry.bytes = Math.min(limit, body.length);
    response.writeHead(status, { "cache-control": "no-cache", ...headers, "content-length": body.length });
    response.write(body.subarray(0, limit), () => {
      if (fault.cut !== undefined) setTimeout(() => response.destroy(), 50);
    });
  };

  const server = createServer((request, response) => {
    answer(request, response).catch((error) => {
      console.error(error);
      response.destroy();
    });
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return {
    url: `http://localhost:${server.address().port}`,
    faults,
    log,
    /** Bytes that were sent of the paths that match, and how often they were asked for. */
    sent: (pattern) => {
      const hits = log.filter(({ path, method }) => method === "GET" && pattern.test(path));
      return { bytes: hits.reduce((sum, { bytes }) => sum + bytes, 0), requests: hits.length, ranges: hits.map(({ range }) => range) };
    },
    close: () => {
      server.closeAllConnections();
      return new Promise((done) => server.close(done));
    },
  };
}
