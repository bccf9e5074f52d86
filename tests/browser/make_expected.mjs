// Writes expected.json: what the native binary makes of a few prompts. node tests/browser/make_expected.mjs target/release/cedra
//
// The prompts are numbers, not texts: they reach every phase of a group and go beyond the window. The first is short, so that it does not matter how it is read.

import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const binary = process.argv[2];
const model = new URL("../fixtures/golden/ckpt_fp8fp4", import.meta.url).pathname;
const scratch = mkdtempSync(join(tmpdir(), "cedra-"));

const run = (tokens, ...rest) => {
  const args = ["generate", "--model", model, "--json", "--tokens", tokens.join(","), ...rest];
  return JSON.parse(execFileSync(binary, args, { encoding: "utf8", stdio: ["ignore", "pipe", "inherit"] }));
};
const prompt = (length, a) => [0, ...Array.from({ length: length - 1 }, (_, i) => 3 + ((i * i * a + i * 13 + 5) % 300))];

/** Logits after a text, of which every layer has read everything. */
const logits = (tokens) => {
  const [ids, out] = [join(scratch, "ids"), join(scratch, "trace.safetensors")];
  writeFileSync(ids, tokens.join(" "));
  execFileSync(binary, ["trace", "--model", model, "--tokens", ids, "--out", out, "--layers", "11..12", "--device", "gpu"]);
  const bytes = readFileSync(out);
  const start = 8 + Number(bytes.readBigUInt64LE());
  const { shape, data_offsets: [from] } = JSON.parse(bytes.toString("utf8", 8, start))["top.logits"];
  const vocabulary = shape.at(-1);
  const last = start + from + 4 * vocabulary * (tokens.length - 1);
  return Array.from({ length: vocabulary }, (_, i) => Number(bytes.readFloatLE(last + 4 * i).toPrecision(7)));
};

const cases = [];
for (const [length, a, prefill] of [[5, 7, "exact"], [40, 11, "bounded"]]) {
  const ids = prompt(length, a);
  const { ids: made, text, finish } = run(ids, "--prefill", prefill, "--max-tokens", "32", "--device", "cpu");
  cases.push({ prompt: ids, prefill, ids: made, text, finish, logits: logits(ids) });
}

// A session that is left and found again: two runs of the program, with a store between them.
const store = ["--session", "a", "--store", join(scratch, "sessions.redb"), "--device", "gpu"];
const first = { prompt: prompt(37, 17), more: [7, 8, 9] };
const left = run(first.prompt, "--max-tokens", "4", ...store).ids;
const found = run(first.more, "--max-tokens", "16", ...store).ids;
rmSync(scratch, { recursive: true });

const out = new URL("expected.json", import.meta.url);
writeFileSync(out, `${JSON.stringify({ cases, session: { ...first, left, found } })}\n`);
for (const { prompt, prefill, ids, finish } of cases) console.log(prompt.length, prefill, ids.length, finish);
console.log("session", left.length, found.length);
