// The drawings beside the conversation, each with one sentence. They show what was measured or counted here, and say so where nothing was.

import type { Attention, LayerRows, Ngrams } from "cedra";
import { bytes, count, h, plural, s, speed } from "./dom.js";
import { cacheBytes, type Config, type Info, plainBytes, ringBytes } from "./model.js";
import type { Speeds } from "./notes.js";

/** What the drawings are of. */
export interface Facts {
  config: Config;
  info: Info;
  /** Rows that each layer has run for the open session. */
  rows?: readonly LayerRows[];
  /** Tokens of the open session. */
  length: number;
  /** Bytes of it in the store. */
  stored?: number;
  /** Since it was opened again: tokens that were there, computed again, and read. */
  restored?: { tokens: number; replayed: number; read: number; asked: boolean };
  /** N-grams of a token: the texts by order, from 2 on, and where they were looked up. */
  ngrams?: { texts: string[]; tables: Ngrams[] };
  attention?: Attention;
  speeds: Speeds;
  /** Speed of the last reading, over time. */
  trail: number[];
}

const WIDE = 340;

function figure(id: string, title: string, drawing: Node, sentence: string): HTMLElement {
  return h("figure", { class: "figure", id: `figure-${id}` }, h("h3", {}, title), h("div", { class: "draw" }, drawing), h("figcaption", {}, sentence));
}

const svg = (height: number, label: string, ...children: SVGElement[]): SVGElement => s("svg", { viewBox: `0 0 ${WIDE} ${height}`, role: "img", "aria-label": label }, ...children);
const text = (x: number, y: number, words: string, attributes: Record<string, string | number> = {}): SVGElement => s("text", { x, y, class: "soft", ...attributes }, words);
const box = (x: number, y: number, width: number, height: number, kind: string): SVGElement => s("rect", { x, y, width: Math.max(0, width), height, class: kind, rx: 1 });

export function drawAll(into: HTMLElement, facts: Facts): void {
  into.replaceChildren(layers(facts), bytesAToken(facts), engram(facts), kept(facts), speeds(facts));
}

function layers({ info, rows, length, restored }: Facts): HTMLElement {
  const { layers } = info;
  const pitch = Math.max(7, Math.min(20, 260 / layers.length));
  const left = 92;
  const right = 74;
  const top = 4;
  const most = Math.max(1, ...(rows ?? []).map(({ whole, part }) => whole + part));
  const parts: SVGElement[] = [];
  const y = (index: number): number => top + (layers.length - 1 - index) * pitch;
  for (const { index, role } of layers) {
    const at = y(index);
    const middle = at + pitch / 2 + 1;
    if (pitch >= 12) {
      parts.push(text(22, middle + 2.5, `${index}`, { "text-anchor": "end" }), text(30, middle + 2.5, role));
    }
    parts.push(box(left, at + pitch / 2 - 1, WIDE - left - right, 1.5, "track"));
    const row = rows?.[index];
    if (!row) continue;
    const scale = (WIDE - left - right) / most;
    const thick = Math.min(9, pitch - 3);
    parts.push(box(left, middle - thick / 2 - 0.5, row.whole * scale, thick, "ink"));
    parts.push(box(left + row.whole * scale, middle - thick / 2 - 0.5, row.part * scale, thick, "warm"));
    if (pitch >= 12) parts.push(text(WIDE, middle + 2.5, row.part > 0 ? `${count(row.whole)} + ${count(row.part)}` : count(row.whole), { "text-anchor": "end" }));
  }
  const { decoder } = info.model;
  for (const [name, from, to] of [["decoder", decoder, layers.length - 1], ["encoder", 0, decoder - 1]] as const) {
    if (to < from) continue;
    const [a, b] = [y(to) + 2, y(from) + pitch - 2];
    parts.push(s("path", { d: `M5 ${a}H2V${b}H5`, class: "hair" }));
    parts.push(text(-4, (a + b) / 2, name, { transform: `rotate(-90 -4 ${(a + b) / 2})`, "text-anchor": "middle" }));
  }
  const drawing = svg(top + layers.length * pitch + 2, "Rows that each layer has run", ...parts);
  const encoder = rows?.[0]?.whole ?? 0;
  const last = rows?.at(-1)?.whole ?? 0;
  const sentence =
    rows && encoder > 0 && restored
      ? `Since the session was opened again the first layer ran ${plural(encoder, "row")} and the last ${count(last)}: of its ${plural(length, "token")}, what those rows did not make came back from the browser's storage.`
      : rows && encoder > 0
        ? `The encoder's layers ran ${plural(encoder, "row")} for these ${plural(length, "token")}, the last layer ${count(last)}: of a text that is far behind, the decoder needs only the entries (pale) that its first layer adds.`
        : "When a text is read, the encoder's layers run every token, and the decoder's only the last window; the rows are counted here once something is read.";
  return figure("layers", "Half the model reads", drawing, sentence);
}

function bytesAToken({ config, info }: Facts): HTMLElement {
  const now = cacheBytes(config, info);
  const plain = plainBytes(config, info);
  const full = info.layers.filter(({ role }) => role === "full").length;
  const scale = WIDE / plain;
  const drawing = svg(
    88,
    `${now} bytes a token against ${plain}`,
    text(0, 14, count(now) + " bytes", { class: "ink", "font-size": 15 }),
    text(WIDE, 14, "here", { "text-anchor": "end" }),
    box(0, 22, now * scale, 12, "hot"),
    text(0, 62, count(plain) + " bytes", { class: "ink", "font-size": 15 }),
    text(WIDE, 62, "one uncompressed cache a layer", { "text-anchor": "end" }),
    box(0, 70, WIDE, 12, "track"),
  );
  const sentence = `From the model's configuration: ${full} of ${info.layers.length} layers keep entries, in 4-bit numbers with their scales, where ${info.layers.length} layers of ${config.head_dim} numbers at 2 bytes would take ${(plain / now).toFixed(1)} times as much; windows add ${bytes(ringBytes(config, info))} once, whatever the length.`;
  return figure("bytes", "Bytes a token", drawing, sentence);
}

function engram({ config, info, ngrams }: Facts): HTMLElement {
  const sizes = config.engram_num_embeddings ?? [];
  const ids = info.layers.filter(({ engram }) => engram).map(({ index }) => index);
  if (ids.length === 0) return figure("engram", "N-grams", h("p", { class: "none" }, "This model has no Engram."), "Some models of the family look n-grams up in tables.");
  const parts: SVGElement[] = [];
  const orders = ngrams?.texts.length ?? 3;
  const gap = 46;
  const first = orders * 24 + 38;
  ids.forEach((layer, slot) => {
    const y = first + slot * gap;
    const size = sizes[slot] ?? 1;
    parts.push(box(0, y, WIDE, 5, "track"));
    parts.push(text(0, y + 18, `layer ${layer}`), text(WIDE, y + 18, `${count(size)} rows`, { "text-anchor": "end" }));
    ngrams?.tables[slot]?.rows.forEach((rows, order) => {
      for (const row of rows) {
        const x = (row / size) * WIDE;
        // From the end of the words, whose letters are all of one width, to the row.
        const from = Math.min(WIDE, 70 + 6.7 * (ngrams.texts[order]?.length ?? 0));
        const level = order * 24 + 12;
        if (slot === 0) parts.push(s("path", { d: `M${from} ${level}C${from + 40} ${level} ${x} ${first - 44} ${x} ${y}`, class: "tie", "stroke-width": 0.8 }));
        parts.push(box(x - 1, y - 4, 2, 13, "hot"));
      }
    });
  });
  for (let order = 0; order < orders; order++) {
    const y = order * 24;
    const words = ngrams?.texts[order];
    parts.push(text(0, y + 16, `${order + 2}-gram`));
    parts.push(words === undefined ? box(62, y + 11, WIDE - 80, 1.5, "track") : text(62, y + 16, words, { class: "ink mono", "xml:space": "preserve" }));
  }
  const label = ngrams ? ngrams.texts.map((words, i) => `${i + 2}-gram ${words}: rows ${ngrams.tables.map(({ rows }) => rows[i]?.join(", ")).join("; ")}`).join(". ") : "Nothing was looked up yet";
  const rows = ngrams?.tables.reduce((sum, { rows }) => sum + rows.flat().length, 0);
  const drawing = svg(first + (ids.length - 1) * gap + 24, label, ...parts);
  const where = `${ids.length === 1 ? "Layer" : "Layers"} ${ids.join(" and ")}`;
  return figure(
    "engram",
    "N-grams of the last token",
    drawing,
    rows === undefined
      ? `${where} ${ids.length === 1 ? "begins" : "begin"} by looking the last few tokens up in tables of learned rows; which rows shows here after the first answer.`
      : `${where} looked the n-grams that end at the last token up in tables of learned rows, which a hash finds: ${plural(rows, "row")} for this token.`,
  );
}

function kept({ length, stored, restored }: Facts): HTMLElement {
  const parts: SVGElement[] = [box(0, 30, WIDE, 12, "track")];
  const share = restored && restored.tokens > 0 ? Math.max(2, (restored.replayed / restored.tokens) * WIDE) : 0;
  if (stored !== undefined) parts.push(box(0, 30, WIDE, 12, "ink"));
  if (restored?.asked) parts.push(box(WIDE - share, 26, share, 20, "hot"));
  parts.push(text(0, 16, stored === undefined ? "not saved yet" : bytes(stored), { class: stored === undefined ? "soft" : "ink", "font-size": 15 }));
  parts.push(text(WIDE, 16, length > 0 ? plural(length, "token") : "", { "text-anchor": "end" }));
  if (restored?.asked) parts.push(text(WIDE, 62, `${count(restored.replayed)} computed again`, { "text-anchor": "end" }));
  const label = stored === undefined ? "Nothing is saved yet" : `${bytes(stored)} are saved`;
  const sentence =
    stored === undefined
      ? "A session is saved in this browser when it has been read, and opens again without being read again."
      : restored === undefined
        ? `The session takes ${bytes(stored)} in this browser; what opening it again costs shows here after a reload.`
        : !restored.asked
          ? `${plural(restored.tokens, "token")} came back from this browser; the next question computes the last window of them again, and shows here how many that were.`
          : `Of ${plural(restored.tokens, "token")} that came back from this browser, ${count(restored.replayed)} were computed again to rebuild the windows, and ${count(restored.read)} new ones were read.`;
  return figure("kept", "What is kept", svg(restored?.asked ? 66 : 50, label, ...parts), sentence);
}

function speeds({ info, speeds, trail }: Facts): HTMLElement {
  const number = (value: number | undefined, what: string): HTMLElement =>
    h("div", {}, h("p", { class: value === undefined ? "number none" : "number" }, value === undefined ? "not measured yet" : speed(value)), h("small", {}, what));
  const numbers = h("div", { class: "pair" }, number(speeds.read, "tokens a second, reading"), number(speeds.write, "tokens a second, writing"));
  const drawing = h("div", {}, numbers);
  if (trail.length > 2) {
    const most = Math.max(...trail);
    const points = trail.map((value, i) => `${((i / (trail.length - 1)) * WIDE).toFixed(1)},${(44 - (value / most) * 38).toFixed(1)}`);
    drawing.append(svg(48, "Speed of the last reading, from its beginning to its end", s("polyline", { points: points.join(" "), class: "tie", "stroke-width": 1.5 }), s("path", { d: `M0 46H${WIDE}`, class: "hair" })));
  }
  const { name, software } = info.adapter;
  const adapter = name || "an adapter without a name";
  return figure("speed", "Speed, measured here", drawing, `Measured in this browser on ${adapter}${software ? ", which computes on the CPU," : ""} with this model${trail.length > 2 ? "; the line is the last reading" : ""}.`);
}
