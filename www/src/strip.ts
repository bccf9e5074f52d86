// The document as a strip: a row a layer, a place a token. What was read, what could be selected, what was.

import type { Attention, LayerRows } from "cedra";
import { count, h } from "./dom.js";
import type { Info } from "./model.js";

/** What the strip shows. */
export interface Shown {
  /** Tokens of the text, and of those the document. */
  length: number;
  document: number;
  /** While it is read: tokens done. */
  done?: number;
  attention?: Attention;
  rows?: readonly LayerRows[];
}

const GUTTER = 62;
const HINT = "Point at the strip to read what is there.";

/** Makes the strip. `textAt` gives the words about a position. */
export class Strip {
  readonly element: HTMLElement;
  readonly #canvas = h("canvas", { role: "img" });
  readonly #range = h("input", { type: "range", min: 0, max: 0, value: 0, step: 1, "aria-label": "Place in the text, to read what is there" });
  readonly #words = h("output", { "aria-live": "off" }, HINT);
  readonly #info: Info;
  #shown: Shown = { length: 0, document: 0 };
  #place: number | undefined;
  #asked = 0;

  constructor(info: Info, textAt: (position: number) => Promise<string>) {
    this.#info = info;
    const plot = h("div", { class: "plot" }, this.#canvas, this.#range);
    plot.style.setProperty("--gutter", `${GUTTER}px`);
    this.element = h("figure", { class: "strip" }, plot, this.#words);
    const look = async (position: number): Promise<void> => {
      this.#place = position;
      this.draw();
      const asked = ++this.#asked;
      const text = await textAt(position).catch(() => "");
      if (asked !== this.#asked) return;
      this.#words.textContent = text ? `Token ${count(position)}: ${text}` : HINT;
      this.#range.setAttribute("aria-valuetext", this.#words.textContent);
    };
    this.#range.addEventListener("input", () => void look(Number(this.#range.value)));
    this.#range.addEventListener("pointermove", (event) => {
      const { left, width } = this.#range.getBoundingClientRect();
      const at = Math.floor(((event.clientX - left) / width) * this.#shown.length);
      void look(Math.max(0, Math.min(this.#shown.length - 1, at)));
    });
    this.#range.addEventListener("pointerleave", () => {
      this.#place = undefined;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(plot);
  }

  show(shown: Shown): void {
    this.#shown = shown;
    this.#range.max = String(Math.max(0, shown.length - 1));
    this.#range.disabled = shown.length === 0 || shown.done !== undefined;
    this.#words.hidden = this.#range.disabled;
    const { attention } = shown;
    const looked = attention?.layers.filter(({ ratio }) => ratio > 0);
    this.#canvas.setAttribute(
      "aria-label",
      attention && looked
        ? `The text, ${count(shown.length)} tokens. The token at ${count(attention.position)} attended to ${looked.map(({ entries }) => entries.length).join(", ")} entries in the layers that look beyond their window.`
        : `The text, ${count(shown.length)} tokens${shown.done === undefined ? "" : `, ${count(shown.done)} of them read`}.`,
    );
    this.draw();
  }

  draw(): void {
    const { layers, model } = this.#info;
    const { length, document: documentEnd, done, attention } = this.#shown;
    const width = this.#canvas.parentElement?.clientWidth ?? 0;
    if (width === 0) return;
    const pitch = Math.max(4, Math.min(15, Math.floor(200 / layers.length)));
    const height = pitch * layers.length + 20;
    const scale = devicePixelRatio;
    const canvas = this.#canvas;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const g = canvas.getContext("2d");
    if (!g) return;
    const style = getComputedStyle(canvas);
    const paint = (name: string): string => resolved(style, name);
    const [ink, soft, line, accent] = ["--ink", "--soft", "--line", "--accent"].map(paint) as [string, string, string, string];
    g.scale(scale, scale);
    g.font = `10px ${style.getPropertyValue("--sans")}`;
    g.textBaseline = "middle";
    const span = width - GUTTER;
    const x = (position: number): number => GUTTER + (span * position) / Math.max(1, length);
    const rowTop = (index: number): number => (layers.length - 1 - index) * pitch;
    const bars = (from: number, to: number, top: number, fill: string, alpha: number, least = 1): void => {
      g.globalAlpha = alpha;
      g.fillStyle = fill;
      const left = x(from);
      g.fillRect(left, top, Math.max(least, x(to) - left), pitch - (pitch > 6 ? 4 : 1));
      g.globalAlpha = 1;
    };
    for (const layer of layers) {
      const top = rowTop(layer.index);
      bars(0, length || 1, top, line, 0.6);
      if (pitch >= 10 || layer.index % Math.ceil(12 / pitch) === 0) {
        g.fillStyle = soft;
        g.textAlign = "left";
        g.fillText(`${layer.index}`, 0, top + pitch / 2 - 2);
        g.fillText(layer.role, 15, top + pitch / 2 - 2);
      }
      if (done !== undefined) {
        // While a text is read bounded, the decoder runs its last window only; of the rest its first layer adds entries.
        const tail = Math.max(0, length - model.window);
        if (layer.part === "encoder") bars(0, done, top, ink, 0.75);
        else if (layer.index === model.decoder) bars(0, Math.min(done, tail), top, ink, 0.25);
        if (layer.part === "decoder" && done > tail) bars(tail, done, top, ink, 0.75);
      }
      const seen = attention?.layers[layer.index];
      if (seen) {
        for (const [from, to] of seen.candidates ?? []) bars(from, to, top, accent, 0.26, 1.5);
        bars(seen.window[0], seen.window[1], top, ink, 0.85, 1.5);
        for (const entry of seen.entries) bars(entry * seen.ratio, (entry + 1) * seen.ratio, top, accent, 0.9, 2);
      }
    }
    const axis = pitch * layers.length + 9;
    g.fillStyle = soft;
    g.textAlign = "left";
    if (length > 0) g.fillText("0", GUTTER, axis);
    g.textAlign = "right";
    if (length > 0) g.fillText(`${count(length)} tokens`, width, axis);
    if (done === undefined && documentEnd > 0 && documentEnd < length) {
      g.fillStyle = ink;
      g.globalAlpha = 0.35;
      g.fillRect(x(documentEnd), 0, 1, pitch * layers.length - 2);
      g.globalAlpha = 1;
    }
    if (this.#place !== undefined) {
      g.fillStyle = ink;
      g.fillRect(x(this.#place + 0.5), 0, 1, pitch * layers.length - 2);
    }
  }
}

/** A colour as a canvas takes it: a custom property may be one of two, by the theme. */
const resolved = (() => {
  const probe = h("i", { hidden: true });
  return (style: CSSStyleDeclaration, name: string): string => {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color || style.getPropertyValue(name);
  };
})();

/** Places of a text that many layers selected, the most selected first: runs of tokens close to each other, before `end`. */
export function places(attention: Attention, end: number, most: number): { from: number; to: number; hit: Set<number> }[] {
  const votes = new Map<number, number>();
  const selecting = attention.layers.filter(({ ratio }) => ratio > 0);
  for (const { entries, ratio } of selecting) {
    for (const entry of entries) {
      for (let at = entry * ratio; at < (entry + 1) * ratio && at < end; at++) votes.set(at, (votes.get(at) ?? 0) + 1 / ratio);
    }
  }
  const positions = [...votes.keys()].sort((a, b) => a - b);
  const runs: { from: number; to: number; hit: Set<number>; votes: number }[] = [];
  for (const at of positions) {
    const last = runs.at(-1);
    if (last && at - last.to <= 4 && at - last.from < 40) {
      last.to = at + 1;
      last.hit.add(at);
      last.votes += votes.get(at)!;
    } else runs.push({ from: at, to: at + 1, hit: new Set([at]), votes: votes.get(at)! });
  }
  return runs.sort((a, b) => b.votes - a.votes || a.from - b.from).slice(0, most);
}
