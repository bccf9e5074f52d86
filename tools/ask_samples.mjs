// Asks the pocket model what the demo page offers to ask about its samples, as a visitor may: each question behind the text alone, each behind
// each of the others, and all of them in the order of the list and in five others. Prints what was answered wrongly; ends with 1 if anything was.
//
//   cargo build --release && node tools/ask_samples.mjs target/release/cedra [FILE]...
//
// On the CPU, whose answers are the device's. The long text takes nine minutes.

import { spawnSync } from "node:child_process";
import { readFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const [program, ...files] = process.argv.slice(2);
if (!program) {
  console.error("usage: ask_samples.mjs CEDRA [FILE]...");
  process.exit(2);
}
const folder = new URL("../www/public/samples/", import.meta.url);
const samples = JSON.parse(await readFile(new URL("samples.json", folder), "utf8"));

/** A permutation of 0 .. n - 1, the same for the same seed. */
function shuffled(n, seed) {
  const order = [...Array(n).keys()];
  for (let i = n - 1, state = seed; i > 0; i--) {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    const j = Math.floor((state / 2 ** 32) * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

let missed = 0;
for (const { file, questions } of samples.filter(({ file }) => files.length === 0 || files.includes(file))) {
  const numbers = [...questions.keys()];
  const conversations = [
    ...numbers.map((a) => [a]),
    ...numbers.flatMap((a) => numbers.filter((b) => b !== a).map((b) => [a, b])),
    numbers,
    ...[1, 2, 3, 4, 5].map((seed) => shuffled(numbers.length, seed)),
  ];
  const lines = [`/load ${fileURLToPath(new URL(file, folder))}`];
  for (const order of conversations) lines.push(...order.map((i) => questions[i].question), ...order.map(() => "/undo"));
  const { stdout, stderr, status } = spawnSync(program, ["chat", "--device", "cpu"], { input: `${lines.join("\n")}\n`, encoding: "utf8", maxBuffer: 1 << 28 });
  const asked = conversations.flatMap((order) => order.map((i, at) => ({ ...questions[i], behind: order.slice(0, at) })));
  const answers = stdout.split("\n").filter((line) => line.trim() !== "");
  if (status !== 0 || answers.length !== asked.length) throw new Error(`${answers.length} answers to ${asked.length} questions\n${stderr.slice(-2000)}`);
  const wrong = asked.map((asked, i) => ({ ...asked, said: answers[i] })).filter(({ answer, said }) => !said.includes(answer));
  for (const { question, said, behind } of wrong) console.log(`${file}: ${question} ${said} (behind ${behind.map((i) => questions[i].question).join(" ") || "the text alone"})`);
  console.log(`${file}: ${asked.length - wrong.length} of ${asked.length} answers are right`);
  missed += wrong.length;
}
process.exit(missed > 0 ? 1 : 0);
