import assert from "node:assert/strict";
import { createHash, randomBytes, randomInt } from "node:crypto";
import { test } from "node:test";
import { sha256, Sha256 } from "../dist/sha256.js";

test("the hash is that of node, whatever the pieces", () => {
  const lengths = [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, ...Array.from({ length: 40 }, () => randomInt(5000))];
  for (const length of lengths) {
    const bytes = randomBytes(length);
    const hash = new Sha256();
    for (let at = 0; at < length; ) {
      const next = Math.min(length, at + randomInt(1, 200));
      hash.update(bytes.subarray(at, next));
      at = next;
    }
    assert.equal(hash.hex(), createHash("sha256").update(bytes).digest("hex"), `${length} bytes`);
  }
  assert.equal(sha256("größer"), createHash("sha256").update("größer").digest("hex"));
});
