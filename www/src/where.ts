// What was tried where. Only that.

import type { Support } from "cedra";
import { by, h } from "./dom.js";

const row = (...cells: string[]): HTMLElement => h("tr", {}, h("th", { scope: "row" }, cells[0]!), ...cells.slice(1).map((cell) => h("td", {}, cell)));

export function whereTable(here: Support): void {
  const adapter = here.adapter ? [here.adapter.vendor, here.adapter.architecture, here.adapter.description].filter(Boolean).join(", ") : "none";
  const found = here.supported ? "has what the engine asks for" : `lacks ${here.missing.join("; ")}`;
  by("where-table").replaceChildren(
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...["Browser", "WebGPU", "What was tried"].map((name) => h("th", { scope: "col" }, name)))),
      h(
        "tbody",
        {},
        row("Chromium 156, headless, Linux", "software, on the CPU (lavapipe and SwiftShader)", "this page and the package, by their tests"),
        row("Every other browser and device", "any", "nothing yet: it may work, and nobody has looked"),
        row("This browser, now", adapter, found),
      ),
    ),
  );
}
