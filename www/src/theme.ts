// Light, dark, or what the system says.

import { by } from "./dom.js";
import { kept } from "./notes.js";

const NAMES = ["system", "light", "dark"] as const;
const WORDS = { system: "As the system", light: "Light", dark: "Dark" };

/** Wires the switch; `changed` hears when colours are others than before. */
export function themeSwitch(changed: () => void): void {
  const button = by("theme");
  let now = NAMES.find((name) => name === kept.getItem("cedra-page/theme")) ?? "system";
  const show = (): void => {
    document.documentElement.dataset["theme"] = now;
    button.textContent = WORDS[now];
    button.setAttribute("aria-label", `Colours: ${WORDS[now].toLowerCase()}`);
    changed();
  };
  button.addEventListener("click", () => {
    now = NAMES[(NAMES.indexOf(now) + 1) % NAMES.length]!;
    kept.setItem("cedra-page/theme", now);
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}
