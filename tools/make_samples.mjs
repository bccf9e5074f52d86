// Makes the texts that the demo page offers to read: passages of this repository's own texts, and between them the logs, settings and
// notes of a made-up team, in which facts are stated once. The same passages give the same texts.
//
//   node tools/make_samples.mjs notebook.txt short.txt    makes these texts, and the list of questions
//   node tools/make_samples.mjs                           makes the list only
//
// The questions in samples.json are those that the pocket model answers rightly about these very texts, whatever was asked before: after new
// ones are made, ask them again (`node tools/ask_samples.mjs target/release/cedra`), and name below what was missed.

import { readdir, readFile, writeFile } from "node:fs/promises";

const root = new URL("..", import.meta.url);
const out = new URL("www/public/samples/", root);

/** A generator with a state of 32 bits (mulberry32): the same numbers everywhere. */
function random(seed) {
  let state = seed;
  const next = () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const below = (n) => Math.floor(next() * n);
  return { below, between: (low, high) => low + below(high - low + 1), of: (list) => list[below(list.length)] };
}

const SERVICES = ["gateway", "ledger", "indexer", "mailer", "scheduler", "archive", "billing", "search", "thumbnailer", "replica"];
const HOSTS = ["alder", "birch", "cedar", "hazel", "juniper", "larch", "maple", "rowan", "spruce", "willow"];
const PEOPLE = ["Ada", "Grace", "Edsger", "Barbara", "Niklaus", "Frances", "Tony", "Radia"];
const DOING = ["reloaded its settings", "rotated the log", "finished a backup", "opened a connection", "closed an idle connection", "compacted a table", "renewed a certificate", "drained the queue"];
const WARNING = ["a retry was needed", "the queue is longer than usual", "the clock was corrected", "a slow query was seen", "the disk is nearly full"];

const two = (n) => String(n).padStart(2, "0");

function log(r) {
  let seconds = r.between(0, 80_000);
  const lines = Array.from({ length: r.between(6, 14) }, () => {
    seconds += r.between(1, 90);
    const at = `${two(Math.floor(seconds / 3600))}:${two(Math.floor(seconds / 60) % 60)}:${two(seconds % 60)}`;
    return r.below(6) === 0
      ? `[${at}] WARN ${r.of(SERVICES)}@${r.of(HOSTS)} ${r.of(WARNING)}`
      : `[${at}] INFO ${r.of(SERVICES)}@${r.of(HOSTS)} ${r.of(DOING)} in ${r.between(2, 900)} ms`;
  });
  return lines.join("\n");
}

function settings(r) {
  const service = r.of(SERVICES);
  const keys = ["workers", "queue_length", "cache_megabytes", "keep_days", "batch"];
  return `[${service}.${r.of(HOSTS)}]\n${keys.slice(0, r.between(3, 5)).map((key) => `${key} = ${r.between(1, 512)}`).join("\n")}`;
}

const note = (r) => `${r.of(PEOPLE)} looked after ${r.of(SERVICES)} on ${r.of(HOSTS)} this week. ${r.of(["Nothing happened.", "It was restarted twice.", "The alarm was too sensitive and was changed.", "Two tickets are open."])}`;

/** What the facts are about: the repository's texts have examples that say other things of them. */
const STATED = /falcon|heron|GRID_SIZE|zorbel|marlow|4821/;

/** Paragraphs of the repository's texts, without tables and short lines. */
async function passages() {
  const files = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/debugging.md", "docs/session-format.md", "docs/shaders.md", "pkg/README.md", "models/pocket/README.md"];
  const source = await readdir(new URL("src/", root), { recursive: true });
  const rust = source.filter((name) => name.endsWith(".rs")).sort();
  const texts = await Promise.all([...files, ...rust.map((name) => `src/${name}`)].map((file) => readFile(new URL(file, root), "utf8")));
  return texts.flatMap((text, i) =>
    text
      .split(/\n{2,}/)
      .filter((part) => part.length > 60 && !/[｜▁]/.test(part) && !STATED.test(part) && !part.startsWith("|"))
      .map((part) => (i < files.length ? part : "```rust\n" + part + "\n```")),
  );
}

/** A text of about so many characters, with the facts at even distances. */
function compose(seed, size, passages, facts) {
  const r = random(seed);
  const parts = [];
  let length = 0;
  let at = r.below(passages.length);
  const add = (part) => {
    parts.push(part);
    length += part.length + 2;
  };
  for (const [i, fact] of facts.entries()) {
    while (length < (size * (i + 0.5)) / facts.length) {
      const kind = r.below(10);
      if (kind < 6) add(passages[at++ % passages.length]);
      else add(kind < 8 ? log(r) : kind === 8 ? settings(r) : note(r));
    }
    add(fact);
  }
  while (length < size) add(passages[at++ % passages.length]);
  return parts.join("\n\n") + "\n";
}

const NOTEBOOK = [
  ["The access code of marlow is QX-7314.", "What is the access code of marlow?", "QX-7314"],
  ["const GRID_SIZE: usize = 2048;", "What is the value of GRID_SIZE?", "2048"],
  ["[14:02:51] ERROR tessel failed with code E4471", "Which code did tessel fail with?", "E4471"],
  ["The port of falcon is 48213.", "What is the port of falcon?", "48213"],
  ["The version of quillon is 3.14.2.", "What is the version of quillon?", "3.14.2"],
  ["The owner of `zorbel` is Ada.", "Who owns `zorbel`?", "Ada"],
  ["[brindle]\nretry_limit = 5190", "What is the retry limit of brindle?", "5190"],
  ["pub const HARBOR_BATCH_SIZE: u32 = 7425;", "What is the value of HARBOR_BATCH_SIZE?", "7425"],
  ["Remember that the passphrase of lantern is copper window.", "What is the passphrase of lantern?", "copper window"],
  ["For `heron`, the timeout is set to 90 seconds.", "What is the timeout of `heron`?", "90 seconds"],
  ["Note: the checksum of lintel is 0x9c4e.", "What is the checksum of lintel?", "0x9c4e"],
  ["The server corvane is hosted in Oslo.", "Where is corvane hosted?", "Oslo"],
  ["The log file of ostrava is /var/log/ostrava.log.", "What is the log file of ostrava?", "/var/log/ostrava.log"],
  ["| spindle | queue depth | 930 |", "What is the queue depth of spindle?", "930"],
  ["The codename of merrow is thunder.", "What is the codename of merrow?", "thunder"],
  ["The reviewer for pellam was changed to Grace.", "What is the reviewer of pellam?", "Grace"],
];
const SHORT = [
  ["The port of heron is 6077.", "What is the port of heron?", "6077"],
  ["const TABLE_ROWS: usize = 7425;", "What is the value of TABLE_ROWS?", "7425"],
  ["The owner of `zorbel` is Ada.", "Who owns `zorbel`?", "Ada"],
  ["[14:02:51] ERROR tessel failed with code 4471", "Which code did tessel fail with?", "4471"],
  ["The access code of marlow is 7314.", "What is the access code of marlow?", "7314"],
];

/** Questions that the pocket model did not always answer rightly are not offered: file and a word of the question. */
const MISSED = ["quillon", "brindle", "lantern", "heron", "GRID_SIZE"].map((word) => ["notebook.txt", word]);

const samples = [
  { file: "notebook.txt", title: "A team's notebook", seed: 41, size: 252_000, facts: NOTEBOOK },
  { file: "short.txt", title: "A page of such a notebook", seed: 7, size: 4_800, facts: SHORT },
];
const asked = new Set(process.argv.slice(2));
const all = await passages();
for (const { file, seed, size, facts } of samples.filter(({ file }) => asked.has(file))) {
  await writeFile(new URL(file, out), compose(seed, size, all, facts.map(([fact]) => fact)));
}
const listed = samples.map(({ file, title, facts }) => ({
  file,
  title,
  questions: facts.filter(([, question]) => !MISSED.some(([of, word]) => of === file && question.includes(word))).map(([, question, answer]) => ({ question, answer })),
}));
await writeFile(new URL("samples.json", out), JSON.stringify(listed, null, 2) + "\n");
