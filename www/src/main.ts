// The page: one engine, one open session, and what a visitor does with it.

import "./style.css";
import { type Attention, CedraError, type Draft, Engine, idb, isSupported, type LoadProgress, type Session, type SessionEntry, type Support } from "cedra";
import { type Advice, adviceFor } from "./advice.js";
import { bar, by, bytes, count, duration, h, plural, speed, when } from "./dom.js";
import { drawAll, type Facts } from "./figures.js";
import { type Config, contextOf, type Controls, controlsOf, folder, type Info, own, readConfig, type Turn, turnsOf } from "./model.js";
import { dropNote, kept, lastSession, type Note, noteOf, setLast, setNote, setSpeeds, type Speeds, speedsOf } from "./notes.js";
import { places, Strip } from "./strip.js";
import { themeSwitch } from "./theme.js";
import { whereTable } from "./where.js";

/** Most tokens of an answer, and room that a document leaves for questions. */
const ANSWER = 128;
const ROOM = 512;

interface Sample {
  file: string;
  title: string;
  questions: { question: string; answer: string }[];
  text: string;
  tokens: number;
}

interface Doc {
  title: string;
  text: string;
  questions: string[];
}

/** What is there once the engine is. */
interface Ready {
  engine: Engine;
  info: Info;
  config: Config;
  controls: Controls;
  store: ReturnType<typeof idb>;
  strip: Strip;
  samples: Sample[];
  /** Tokens that are guessed for each pass to verify, where the address says. */
  draft?: Draft;
}

/** An answer as it was made: what was guessed and stood is told apart. */
interface Made {
  pieces: { text: string; drafted: boolean }[];
  tokens: number;
  drafted: number;
}

/** The session that is open. */
interface Open {
  session: Session;
  name: string;
  note: Note;
  tokens: Uint32Array;
  turns: Turn[];
  /** The token that begins the last answer, and the last one. */
  looks: { first?: Attention; last?: Attention };
  look: "first" | "last";
  /** Answers that were made since it was opened, by where they begin. */
  made: Map<number, Made>;
  stored?: number;
  restored?: NonNullable<Facts["restored"]>;
  ngrams?: NonNullable<Facts["ngrams"]>;
  /** What a reading that was stopped has not read. */
  unread?: Uint32Array;
}

let ready: Ready | undefined;
let open: Open | undefined;
let speeds: Speeds = {};
let trail: number[] = [];
/** Tokens that were made in this tab, and how long that took. */
const written = { tokens: 0, ms: 0 };
/** Ends what is being read or written. */
let working: AbortController | undefined;

/** From now on something is read or written, or nothing is: only one thing goes on at a time. */
function work(now: AbortController | undefined): void {
  working = now;
  by("sessions").inert = now !== undefined;
  by("ask").classList.toggle("busy", now !== undefined);
}

// --- messages

function notice(advice: Advice | undefined, ...actions: HTMLElement[]): void {
  const place = by("notice");
  place.replaceChildren();
  if (!advice) return;
  const box = h("div", { class: "notice" }, h("b", {}, advice.title), advice.text);
  if (actions.length > 0) box.append(h("div", {}, ...actions));
  place.append(box);
}

const button = (words: string, act: () => void, kind = "quiet"): HTMLButtonElement => h("button", { type: "button", class: kind, click: act }, words);

const problem = (thrown: unknown, ...actions: HTMLElement[]): void => notice(adviceFor(thrown), ...actions);

/** Runs something that takes time; what it throws is shown. */
function start(work: () => Promise<void>): void {
  work().catch((thrown: unknown) => problem(thrown));
}

const say = (words: string): void => {
  by("said").textContent = words;
};

// --- the engine

function engineLine(...children: (Node | string)[]): void {
  by("engine").replaceChildren(...children);
}

const fact = (name: string, value: string): HTMLElement => h("span", {}, h("b", {}, value), ` ${name}`);

async function boot(): Promise<void> {
  themeSwitch(() => {
    ready?.strip.draw();
  });
  by("about-model").textContent = own
    ? "This is the pocket model: 8 million parameters, trained for four hours on two CPU cores. It answers questions about values that a text states, most of the time, and knows nothing else."
    : `The model is the one at ${folder.href}.`;
  const progress = bar("Loading");
  const words = h("span", { role: "status" }, "Asking the browser what it has…");
  engineLine(words, progress.element);
  intake(false);
  const support = await isSupported();
  whereTable(support);
  if (!support.supported) {
    engineLine(h("span", {}, h("b", {}, "This browser cannot run it."), ` Missing: ${support.missing.join("; ")}.`));
    notice({
      title: "This browser lacks what a model needs",
      text: `Missing: ${support.missing.join("; ")}. The page shows what it would do; a current Chrome or Edge on a device with WebGPU can do it.`,
    });
    return;
  }
  await load(support, words, progress);
}

/** `?draft=auto`, `off` or a number. */
function draftOf(words: string | null): Draft | undefined {
  if (words === "auto" || words === "off") return words;
  return words !== null && /^\d+$/.test(words) ? Number(words) : undefined;
}

async function load(support: Support, words: HTMLElement, progress: ReturnType<typeof bar>): Promise<void> {
  try {
    const config = await readConfig(kept);
    const context = config && contextOf(config);
    let planned = "";
    if (context !== undefined) {
      const plan = await Engine.plan(folder.href, { context }).catch(() => undefined);
      if (typeof plan?.["total"] === "number") planned = ` It will take ${bytes(plan["total"])} of the device's memory.`;
    }
    const stages = { download: "Weights arrive", verify: "Weights are compared with their hash", load: "Weights go to the device" };
    const heard = (event: LoadProgress): void => {
      words.textContent = `${stages[event.stage]}: ${bytes(event.loaded)} of ${bytes(event.total)}.${planned}`;
      progress.set(event.loaded / Math.max(1, event.total));
    };
    words.textContent = `The engine starts.${planned}`;
    // On a CPU, many rows at a time are no faster, and the page would hear of them, and could stop, only when all are done.
    const chunk = /swiftshader|llvmpipe/i.test(support.adapter?.architecture ?? "") ? 32 : undefined;
    const draft = draftOf(new URLSearchParams(location.search).get("draft"));
    const engine = await Engine.load(folder.href, { onProgress: heard, ...(context !== undefined && { context }), ...(chunk && { chunk }), ...(draft !== undefined && { draft: draft !== "off" }) });
    const info = structuredClone(engine.info) as unknown as Info;
    // In a browser the engine is not told what the adapter is called; the page is.
    info.adapter.name ||= [support.adapter?.vendor, support.adapter?.architecture].filter(Boolean).join(" ");
    const known = config ?? (await readConfig(kept));
    if (!known) throw new CedraError("NOT_FOUND", `${folder.href}config.json could not be read`);
    const controls = await controlsOf(engine);
    const store = idb(`cedra-page-${info.model.fingerprint.weights.slice(0, 12)}`);
    const strip = new Strip(info, (position) => wordsAt(position));
    ready = { engine, info, config: known, controls, store, strip, samples: [], ...(draft !== undefined && { draft }) };
    speeds = speedsOf(store.name, info.adapter.name);
    const kind = { files: "your files", opfs: "this browser's file storage", cache: "this browser's cache", memory: "memory only" }[engine.weights];
    engineLine(
      h("span", { role: "status" }, h("b", {}, "Ready."), own ? " The pocket model" : " The model"),
      fact("layers", String(info.layers.length)),
      fact("of weights, from ", bytes(info.memory.weights)),
      fact("tokens of context", count(info.context)),
      h("span", {}, "on ", h("b", {}, info.adapter.name || "an adapter without a name"), info.adapter.software ? " (computes on the CPU)" : ""),
    );
    by("engine").children[2]!.append(kind);
    if (support.degraded.length > 0) notice({ title: "It works, with something missing", text: `${support.degraded.join("; ")}.` });
    by<HTMLButtonElement>("new").disabled = false;
    figures();
    await Promise.all([samples(), sessions()]);
    const last = lastSession(store.name);
    if (last !== undefined && (await engine.sessions(store)).some(({ name }) => name === last)) await openSession(last);
    else intake(true);
  } catch (thrown) {
    const advice = adviceFor(thrown);
    engineLine(h("span", { role: "status" }, h("b", {}, "The model could not be loaded.")));
    notice(advice, button("Try again", () => {
      notice(undefined);
      engineLine(words, progress.element);
      void load(support, words, progress);
    }));
  }
}

async function samples(): Promise<void> {
  const { engine } = ready!;
  try {
    const list = (await (await fetch(new URL("samples/samples.json", document.baseURI))).json()) as Sample[];
    for (const sample of list) {
      sample.text = await (await fetch(new URL(`samples/${sample.file}`, document.baseURI))).text();
      sample.tokens = (await engine.encode(sample.text.trimEnd())).length;
    }
    ready!.samples = list;
  } catch {
    return; // Without them there are still the visitor's own files.
  }
  if (!open) intake(true);
}

// --- taking a document in

/** What a visitor can read. Before the engine is there, it is shown and cannot be used. */
function intake(usable: boolean): void {
  const files = h("input", { type: "file", multiple: true, id: "files", class: "hidden", accept: ".txt,.md,.log,.json,.yaml,.yml,.toml,.csv,.html,.css,.js,.ts,.py,.rs,.go,.c,.h,.cpp,.java,.sh,text/*", tabindex: -1, "aria-hidden": true });
  files.addEventListener("change", () => start(() => takeFiles([...(files.files ?? [])])));
  const choose = button("Choose files", () => files.click(), "primary");
  choose.disabled = !usable;
  const list = h("ul", { class: "samples" });
  for (const sample of ready?.samples ?? []) {
    const time = speeds.read === undefined ? "" : `, about ${duration(sample.tokens / speeds.read)} here`;
    const act = (): void => start(() => read({ title: sample.title, text: sample.text, questions: sample.questions.map(({ question }) => question) }));
    list.append(
      h("li", {}, h("button", { type: "button", click: act }, h("span", {}, sample.title), h("small", {}, `${plural(sample.tokens, "token")}${time}`))),
    );
  }
  const drop = h(
    "div",
    { class: "intake" },
    h("p", { class: "big" }, "Drop a text here: notes, a manual, a log, some code."),
    choose,
    files,
    h("p", { class: "or" }, ready?.samples.length ? "Or read something that is here already:" : usable ? "" : "The model loads first."),
    list,
  );
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (usable) start(() => takeFiles([...(event.dataTransfer?.files ?? [])]));
  });
  by("document-title").textContent = "A document to read";
  by("document-facts").textContent = "";
  by("intake").replaceChildren(drop);
  by("strip").replaceChildren();
  by("turns").replaceChildren();
  by("reading").hidden = true;
  by("composer").hidden = true;
  by("suggestions").hidden = true;
}

async function takeFiles(files: File[]): Promise<void> {
  if (files.length === 0) return;
  const texts: string[] = [];
  for (const file of files) {
    const text = await file.text();
    if (text.includes("\0") || (text.match(/\ufffd/g)?.length ?? 0) > text.length / 100) {
      notice({ title: `${file.name} is not a text`, text: "Texts in UTF-8 can be read: plain text, Markdown, logs, settings, code. For a PDF or a word processor's file, save it as text first." });
      return;
    }
    if (text.trim() === "") {
      notice({ title: `${file.name} is empty`, text: "There is nothing in it to read." });
      return;
    }
    texts.push(files.length > 1 ? `# ${file.name}\n\n${text}` : text);
  }
  const title = files.length === 1 ? files[0]!.name : `${files[0]!.name} and ${files.length - 1} more`;
  await read({ title, text: texts.join("\n\n"), questions: [] });
}

async function read(document: Doc, most?: number): Promise<void> {
  if (!ready || working) return;
  notice(undefined);
  const { engine, info, controls, store } = ready;
  const text = await engine.encode(document.text.replaceAll("\r\n", "\n").trimEnd());
  const room = info.context - ROOM;
  if (text.length + 2 > room && most === undefined) {
    notice(
      { title: "The document is longer than this model can hold", text: `It has ${plural(text.length, "token")}; ${count(info.context)} fit, with room for questions ${count(room)}.` },
      button(`Read the first ${count(room - 2)} tokens`, () => start(() => read(document, room - 2))),
    );
    return;
  }
  const ids = Uint32Array.of(controls.bos, controls.user, ...text.subarray(0, most ?? text.length));
  await leave();
  const name = `s-${Date.now().toString(36)}`;
  const session = await engine.session(name, { store });
  const note: Note = { title: document.title, document: ids.length, characters: document.text.length, questions: document.questions };
  open = { session, name, note, tokens: new Uint32Array(), turns: [], looks: {}, look: "first", made: new Map() };
  setNote(store.name, name, note);
  await readOn(ids);
}

/** Reads tokens into the open session, and says how it goes. */
async function readOn(ids: Uint32Array): Promise<void> {
  const { strip, store, info } = ready!;
  const now = open!;
  const before = now.session.length;
  const total = before + ids.length;
  const abort = new AbortController();
  work(abort);
  by("intake").replaceChildren();
  by("turns").replaceChildren();
  by("composer").hidden = true;
  by("suggestions").hidden = true;
  by("document-title").textContent = now.note.title;
  by("document-facts").textContent = `${plural(total, "token")}. The encoder reads them all; the decoder only needs the end.`;
  by("strip").replaceChildren(strip.element);
  const done = h("p", { class: "number" }, count(before));
  const rate = h("p", { class: "number" }, "…");
  const left = h("p", { class: "number" }, "…");
  const line = bar("Reading");
  const stop = button("Stop", () => working?.abort(), "primary");
  const of = h("small", {}, `of ${plural(total, "token")} read`);
  by("reading").replaceChildren(h("div", {}, done, of), h("div", {}, rate, h("small", {}, "tokens a second")), h("div", {}, left, h("small", {}, "left")), stop, line.element);
  by("reading").hidden = false;
  by("reading").className = "reading";
  strip.show({ length: total, document: 0, done: before });
  say(`Reading ${now.note.title}, ${plural(total, "token")}.`);
  trail = [];
  /** The first news: what came before it is compiling, too, and no speed of reading. */
  let first: { at: number; tokens: number } | undefined;
  let mark = { at: 0, tokens: 0 };
  const heard = ({ done: tokens }: { done: number }): void => {
    const at = performance.now();
    clearTimeout(waits);
    of.textContent = `of ${plural(total, "token")} read`;
    done.textContent = count(before + tokens);
    line.set((before + tokens) / total);
    strip.show({ length: total, document: 0, done: before + tokens });
    first ??= { at, tokens };
    if (tokens > mark.tokens && at - mark.at > 200 && mark.tokens > 0) {
      trail.push((1000 * (tokens - mark.tokens)) / (at - mark.at));
      if (trail.length > 240) trail = trail.filter((_, i) => i % 2 === 1);
    }
    if (tokens > mark.tokens) mark = { at, tokens };
    if (at - first.at > 400 && tokens > first.tokens) {
      const mean = (1000 * (tokens - first.tokens)) / (at - first.at);
      rate.textContent = speed(mean);
      left.textContent = duration((ids.length - tokens) / mean);
    }
  };
  // Nothing moves until the first rows are through, and before them the kernels are compiled.
  const waits = setTimeout(() => (of.textContent = `of ${plural(total, "token")} read; the browser compiles the kernels first`), 2500);
  let stopped = false;
  try {
    const { reused } = await now.session.append(ids, { signal: abort.signal, onProgress: heard });
    // Too few tokens say little of a speed, and what was taken over was not read.
    const fresh = mark.tokens - (first?.tokens ?? 0);
    if (first && fresh >= 64 && reused === 0) measured({ read: (1000 * fresh) / (mark.at - first.at) });
  } catch (thrown) {
    if (!(thrown instanceof CedraError) || thrown.code !== "ABORTED") throw thrown;
    stopped = true;
  } finally {
    clearTimeout(waits);
    work(undefined);
    by("reading").hidden = true;
  }
  const read = now.session.length - before;
  if (stopped && read < ids.length) now.unread = ids.slice(read);
  else delete now.unread;
  now.note.document = now.session.length;
  setNote(store.name, now.name, now.note);
  if (now.session.length === 0) {
    await forget(now.name);
    return;
  }
  await keep();
  await show();
  say(stopped ? `Stopped after ${plural(read, "token")}.` : `Read. Ask about it.`);
  if (!matchMedia("(pointer: coarse)").matches && info) by("question").focus({ preventScroll: true });
}

function measured(found: Speeds): void {
  const { store, info } = ready!;
  speeds = { ...speeds, ...found };
  setSpeeds(store.name, info.adapter.name, speeds);
  figures();
}

// --- the open session

/** Saves the open session. */
async function keep(): Promise<void> {
  const { engine, store } = ready!;
  const now = open!;
  const trouble = now.session.storeError;
  if (trouble) {
    problem(trouble);
    return;
  }
  try {
    await now.session.save();
    setLast(store.name, now.name);
    const stored = (await engine.sessions(store)).find(({ name }) => name === now.name)?.bytes;
    if (stored !== undefined) now.stored = stored;
  } catch (thrown) {
    problem(thrown, button("Save again", () => start(async () => {
      notice(undefined);
      await keep();
      await sessions();
    })));
  }
}

/** Closes the open session; what was not saved is saved first. */
async function leave(): Promise<void> {
  const now = open;
  if (!now) return;
  if (!now.session.persisted && now.session.length > 0 && !now.session.storeError) await now.session.save();
  open = undefined;
  await now.session.close();
}

async function openSession(name: string): Promise<void> {
  if (!ready || working) return;
  const { engine, store } = ready;
  notice(undefined);
  await leave();
  let session: Session;
  try {
    session = await engine.session(name, { store });
  } catch (thrown) {
    intake(true);
    problem(thrown, button("Try again", () => start(() => openSession(name))), button("Read something else", () => start(fresh)));
    await sessions();
    return;
  }
  const stored = (await engine.sessions(store)).find((entry) => entry.name === name)?.bytes;
  const note = noteOf(store.name, name) ?? { title: name, document: session.length, characters: 0, questions: [] };
  const restored = { tokens: session.length, replayed: 0, read: 0, asked: false };
  open = { session, name, note, tokens: new Uint32Array(), turns: [], looks: {}, look: "first", made: new Map(), restored, ...(stored !== undefined && { stored }) };
  setLast(store.name, name);
  await show();
}

/** Shows the open session as it is. */
async function show(): Promise<void> {
  const now = open!;
  const { strip, controls } = ready!;
  now.tokens = await now.session.tokens();
  now.turns = turnsOf(now.tokens, now.note.document, controls);
  by("intake").replaceChildren();
  by("reading").hidden = true;
  by("document-title").textContent = now.note.title;
  by("document-facts").textContent = factsLine(now);
  by("strip").replaceChildren(strip.element, h("div", { id: "looked" }));
  await turns();
  composer();
  await Promise.all([looked(), sessions()]);
  figures();
}

function factsLine({ note, session, restored }: Open): string {
  const parts = [`${plural(note.document, "token")} read`];
  if (session.length > note.document) parts.push(`${plural(session.length - note.document, "token")} of questions and answers`);
  parts.push(`room for ${count(session.remaining)} more`);
  if (restored) parts.push(restored.asked ? `after opening: ${count(restored.replayed)} computed again, ${count(restored.read)} read` : "opened again without reading it");
  return `${parts.join(" · ")}.`;
}

async function turns(): Promise<void> {
  const now = open!;
  const { engine } = ready!;
  const list = by("turns");
  const items = await Promise.all(
    now.turns.map(async (turn, i) => {
      const [question, answer] = await Promise.all([engine.decode(turn.question), engine.decode(turn.answer)]);
      return turnItem(question.trim(), answer, turn, i);
    }),
  );
  if (now.unread) items.push(h("li", {}, h("p", { class: "question" }, `Reading was stopped. ${plural(now.unread.length, "token")} of the document are not read.`), h("div", { class: "tools" }, button("Go on reading", () => start(() => readOn(now.unread!))))));
  list.replaceChildren(...items);
}

/** A piece of an answer; what was guessed and stood is in another shade. */
const shaded = (text: string, drafted: boolean): Node => (drafted ? h("span", { class: "drafted", title: "guessed by the draft, and verified" }, text) : document.createTextNode(text));

/** How many tokens a round made, where some were guessed. Each round ends with a token of the model's own. */
function guessed(made: Made | undefined): string {
  if (!made?.drafted) return "";
  const rounds = Math.max(1, made.tokens - made.drafted);
  return `, ${count(made.drafted)} of them guessed and verified: ${(made.tokens / rounds).toFixed(1)} a round`;
}

function turnItem(question: string, answer: string, turn: Turn, index: number): HTMLLIElement {
  const item = h("li");
  const made = open?.made.get(turn.answerStart);
  const edit = button("Edit and ask again", () => {
    const words = h("textarea", { rows: 2, "aria-label": "The question, to be changed" });
    words.value = question;
    const after = open!.turns.length - 1 - index;
    const again = button("Ask again", () => start(() => askAgain(turn, words.value)), "primary");
    const form = h(
      "div",
      { class: "edit" },
      words,
      h("div", {}, again, button("Cancel", () => item.replaceWith(turnItem(question, answer, turn, index))), after > 0 && h("span", { class: "aside" }, `${after === 1 ? "The turn" : `The ${after} turns`} after it will go.`)),
    );
    item.replaceChildren(form);
    words.focus();
  }, "link");
  const branch = button("Branch from here", () => start(() => branchAt(turn)), "link");
  item.append(
    h("p", { class: "question" }, question),
    h("p", { class: "answer" }, ...(made?.drafted && answer.trim() ? made.pieces.map(({ text, drafted }) => shaded(text, drafted)) : [answer.trim() || "(nothing)"])),
    h("div", { class: "tools" }, edit, branch, h("small", {}, plural(turn.end - turn.answerStart, "token") + guessed(made))),
  );
  return item;
}

function composer(): void {
  const now = open!;
  const asked = new Set([...by("turns").querySelectorAll(".question")].map((question) => question.textContent));
  const left = now.note.questions.filter((question) => !asked.has(question)).slice(0, 4);
  by("suggestions").replaceChildren(...left.map((question) => h("button", { type: "button", click: () => start(() => ask(question)) }, question)));
  by("suggestions").hidden = left.length === 0;
  by("composer").hidden = false;
  by("send").hidden = false;
  by("stop").hidden = true;
}

// --- asking

async function ask(question: string): Promise<void> {
  const words = question.trim();
  if (!ready || !open || working || words === "") return;
  notice(undefined);
  const { engine, controls, draft } = ready;
  const now = open;
  const { session } = now;
  const abort = new AbortController();
  const { signal } = abort;
  work(abort);
  by("send").hidden = true;
  by("stop").hidden = false;
  by("suggestions").hidden = true;
  by<HTMLTextAreaElement>("question").value = "";
  const out = h("p", { class: "answer busy" });
  const item = h("li", {}, h("p", { class: "question" }, words), out);
  by("turns").append(item);
  item.scrollIntoView({ block: "nearest" });
  delete now.unread;
  const before = session.length;
  let asked = false;
  try {
    const first = now.turns.length === 0;
    const ids = await engine.encode(first ? `\n\n${words}` : words);
    const begin = first ? [] : now.tokens.at(-1) === controls.eos ? [controls.user] : [controls.eos, controls.user];
    await session.append(Uint32Array.of(...begin, ...ids, ...controls.answer), { signal });
    asked = true;
    const made: Made = { pieces: [], tokens: 0, drafted: 0 };
    now.made.set(session.length, made);
    if (now.restored) Object.assign(now.restored, { asked: true, read: now.restored.read + session.length - before });
    const room = Math.min(ANSWER, session.remaining);
    // The token that begins the answer is the one that has looked for it: it is made first, so that one can see where it looked.
    for (const maxTokens of [1, room - 1]) {
      let finish: string | undefined;
      const begun = performance.now();
      for await (const piece of session.generate({ maxTokens, signal, ...(maxTokens === 1 ? { draft: "off" } : draft !== undefined && { draft }) })) {
        if (maxTokens > 1) written.tokens += piece.ids.length + (piece.finish === "stop" ? 1 : 0);
        const drafted = piece.drafted.at(-1) === 1;
        made.pieces.push({ text: piece.text, drafted });
        made.tokens += piece.ids.length;
        made.drafted += piece.drafted.reduce((sum, one) => sum + one, 0);
        out.append(shaded(piece.text, drafted));
        finish = piece.finish;
      }
      // The first token may wait for kernels to be compiled, which is no speed of writing.
      if (maxTokens > 1) written.ms += performance.now() - begun;
      const look = await session.attention();
      if (maxTokens === 1) {
        delete now.looks.last;
        if (look) now.looks.first = look;
      } else if (look) now.looks.last = look;
      if (finish === "stop" || room <= 1) break;
    }
    // Answers are short: several of them make one measurement.
    if (written.tokens >= 4) measured({ write: (1000 * written.tokens) / written.ms });
    now.look = "first";
  } catch (thrown) {
    if (!(thrown instanceof CedraError) || thrown.code !== "ABORTED") problem(thrown);
    if (!asked) {
      // Half a question is none.
      if (session.length > before) await session.truncate(before);
      by<HTMLTextAreaElement>("question").value = words;
    }
  } finally {
    work(undefined);
  }
  out.classList.remove("busy");
  say(out.textContent ? `Answer: ${out.textContent}` : "No answer.");
  if (now.restored?.asked) now.restored.replayed = session.replayed;
  await keep();
  await grams();
  await show();
}

async function askAgain(turn: Turn, question: string): Promise<void> {
  if (!open || working || question.trim() === "") return;
  await open.session.truncate(turn.start);
  if (open.restored) open.restored.replayed = open.session.replayed;
  open.looks = {};
  await show();
  await ask(question);
}

async function branchAt(turn: Turn): Promise<void> {
  if (!ready || !open || working) return;
  const { store } = ready;
  const now = open;
  const fork = await now.session.fork();
  await fork.truncate(turn.end);
  const name = `s-${Date.now().toString(36)}`;
  const note: Note = { ...now.note, title: `${now.note.title.replace(/ \(branch\)$/, "")} (branch)` };
  setNote(store.name, name, note);
  await fork.save({ name, store });
  await leave();
  open = { session: fork, name, note, tokens: new Uint32Array(), turns: [], looks: {}, look: "first", made: new Map() };
  await keep();
  await show();
  say("A branch. The session it comes from is in the list as it was.");
  by("question").focus({ preventScroll: true });
}

// --- what the strip and the figures show

/** Words about a position, the token there between brackets. */
async function wordsAt(position: number): Promise<string> {
  const { engine } = ready!;
  const tokens = open?.tokens;
  if (!tokens || position >= tokens.length) return "";
  const part = (from: number, to: number): Promise<string> => engine.decode(tokens.slice(Math.max(0, from), Math.max(0, to)));
  const [before, at, after] = await Promise.all([part(position - 18, position), part(position, position + 1), part(position + 1, position + 20)]);
  return `${before}[${at}]${after}`.replaceAll("\n", " ↵ ");
}

async function looked(): Promise<void> {
  const now = open;
  const place = document.getElementById("looked");
  if (!now || !place || !ready) return;
  const { strip, info } = ready;
  const attention = now.looks[now.look] ?? now.looks.first;
  strip.show({ length: now.session.length, document: now.note.document, ...(attention && { attention }) });
  const topk = Math.max(0, ...(attention?.layers.map(({ entries }) => entries.length) ?? []));
  const sentence = attention
    ? `The indexer chose at most ${plural(topk, "entry").replace("entrys", "entries")} a layer of this text for the token at ${count(attention.position)}; in layers that reindex it could only choose from the blocks drawn pale.`
    : "Where the model looks in the text shows here with the first answer.";
  const legend = h("div", { class: "legend" }, h("span", {}, h("i", { class: "selected" }), "chosen"), h("span", {}, h("i", { class: "candidate" }), "could be chosen"), h("span", {}, h("i", { class: "seen" }), "window"));
  if (now.looks.first && now.looks.last) {
    const choice = h("div", { class: "choice", role: "group", "aria-label": "Which token's attention is shown" });
    for (const [look, words] of [["first", "Answer begins"], ["last", "Answer ends"]] as const) {
      choice.append(
        h("button", { type: "button", "aria-pressed": String(now.look === look), click: () => {
          now.look = look;
          start(looked);
          document.querySelector<HTMLButtonElement>(`.choice [aria-pressed="true"]`)?.focus();
        } }, words),
      );
    }
    legend.append(choice);
  }
  const list = h("ol", { class: "passages", "aria-label": "Where most layers looked" });
  if (attention) {
    const end = Math.min(now.note.document, attention.position + 1 - info.model.window);
    for (const { from, to, hit } of places(attention, end, 3)) list.append(h("li", {}, h("small", {}, `token ${count(from)}`), await quote(now.tokens, from, to, hit)));
  }
  place.replaceChildren(...(attention ? [legend] : []), h("p", { class: "figcaption" }, sentence));
  document.querySelector(".passages")?.remove();
  if (list.childElementCount > 0) document.querySelector("#turns > li:last-child .answer")?.after(list);
}

/** A passage, with what was chosen in it marked. */
async function quote(tokens: Uint32Array, from: number, to: number, hit: Set<number>): Promise<HTMLElement> {
  const { engine } = ready!;
  const [begin, end] = [Math.max(2, from - 10), Math.min(tokens.length, to + 10)];
  const words = h("q");
  for (let at = begin; at < end; ) {
    let run = at + 1;
    while (run < end && hit.has(run) === hit.has(at)) run += 1;
    const text = (await engine.decode(tokens.slice(at, run))).replaceAll("\n", " ");
    words.append(hit.has(at) ? h("mark", {}, text) : text);
    at = run;
  }
  return words;
}

/** The n-grams of the last token. */
async function grams(): Promise<void> {
  const { engine } = ready!;
  const now = open!;
  const tokens = await now.session.tokens();
  // An end token says little: the one before it is the last that one can read.
  const at = tokens.length - (tokens.at(-1) === ready!.controls.eos ? 2 : 1);
  const tables = await now.session.ngrams(at);
  const orders = tables[0]?.rows.length ?? 0;
  const texts: string[] = [];
  for (let order = 2; order < orders + 2; order++) {
    const parts: string[] = [];
    for (const id of tokens.slice(Math.max(0, at + 1 - order), at + 1)) parts.push((await engine.decode([id])).replaceAll("\n", "↵"));
    texts.push(parts.join("|"));
  }
  now.ngrams = { texts, tables };
}

function figures(): void {
  if (!ready) return;
  const { config, info } = ready;
  const now = open;
  const attention = now?.looks.last ?? now?.looks.first;
  drawAll(by("figure-list"), {
    config,
    info,
    length: now?.session.length ?? 0,
    speeds,
    trail,
    ...(now && now.session.layerRows.some(({ whole }) => whole > 0) && { rows: now.session.layerRows }),
    ...(now?.stored !== undefined && { stored: now.stored }),
    ...(now?.restored && { restored: now.restored }),
    ...(now?.ngrams && { ngrams: now.ngrams }),
    ...(attention && { attention }),
  });
}

// --- all sessions

async function sessions(): Promise<void> {
  const { engine, store } = ready!;
  let list: SessionEntry[];
  try {
    list = (await engine.sessions(store)).sort((a, b) => b.savedAt - a.savedAt);
  } catch (thrown) {
    by("usage").textContent = adviceFor(thrown).text;
    return;
  }
  by("session-list").replaceChildren(...list.map(sessionItem));
  const usage = await engine.usage(store);
  const more = usage.available === undefined ? "" : `; the browser grants ${bytes(usage.available)} more`;
  by("usage").textContent = list.length === 0 ? "What you read is kept here, in this browser only." : `${bytes(usage.bytes)} in this browser${more}. What sessions have in common is kept once.`;
}

function sessionItem({ name, tokens, bytes: size, savedAt }: SessionEntry): HTMLLIElement {
  const title = noteOf(ready!.store.name, name)?.title ?? name;
  const current = open?.name === name;
  const item = h("li");
  const drop = h("button", { type: "button", class: "drop", "aria-label": `Delete ${title}`, click: () => {
    const sure = h(
      "div",
      { class: "sure" },
      button("Delete", () => start(() => forget(name)), "link"),
      button("Keep", () => {
        sure.remove();
        drop.focus();
      }, "link"),
    );
    item.querySelector(".sure")?.remove();
    item.append(sure);
    sure.querySelector("button")?.focus();
  } }, "×");
  item.append(
    h(
      "button",
      { type: "button", class: "open", "aria-current": current ? "true" : undefined, click: () => {
        if (!current) start(() => openSession(name));
      } },
      h("span", {}, title),
      h("small", {}, `${plural(tokens, "token")}, ${bytes(size)}`),
      h("small", {}, when(savedAt)),
    ),
    drop,
  );
  return item;
}

async function forget(name: string): Promise<void> {
  if (!ready || working) return;
  const { engine, store } = ready;
  if (open?.name === name) {
    const { session } = open;
    open = undefined;
    await session.close();
    setLast(store.name, undefined);
  }
  await engine.delete(name, { store });
  dropNote(store.name, name);
  await sessions();
  if (!open) await fresh();
}

/** Goes back to the choice of a document. */
async function fresh(): Promise<void> {
  if (working) return;
  notice(undefined);
  await leave();
  setLast(ready!.store.name, undefined);
  intake(true);
  figures();
  await sessions();
  by("ask").focus({ preventScroll: true });
}

// --- wiring

by("new").addEventListener("click", () => start(fresh));
by("stop").addEventListener("click", () => working?.abort());
by("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  start(() => ask(by<HTMLTextAreaElement>("question").value));
});
by("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    start(() => ask(by<HTMLTextAreaElement>("question").value));
  }
});
// A text that is dropped beside the place for it would make the browser leave the page.
for (const type of ["dragover", "drop"]) addEventListener(type, (event) => event.preventDefault());

if (import.meta.env.PROD && "serviceWorker" in navigator) {
  navigator.serviceWorker.register(new URL("sw.js", document.baseURI)).catch(() => {
    // Without it the page needs the network; all else is the same.
  });
}

start(boot);
