// What went wrong, in words, and what to do.

import { CedraError } from "cedra";
import { bytes, count } from "./dom.js";

export interface Advice {
  title: string;
  text: string;
}

const number = (value: unknown): number | undefined => (typeof value === "number" ? value : undefined);

export function adviceFor(thrown: unknown): Advice {
  const message = thrown instanceof Error ? thrown.message : String(thrown);
  if (!(thrown instanceof CedraError)) return { title: "Something went wrong", text: message };
  const { code, data } = thrown;
  switch (code) {
    case "SESSION_BUSY":
      return { title: "Another tab has this session open", text: "A session has one writer at a time. Close it there (or close that tab), then try again." };
    case "NO_GPU":
      return { title: "No WebGPU adapter", text: "This browser offers no device to compute on. Try a current Chrome or Edge, or switch hardware acceleration on in the settings." };
    case "DEVICE_LIMIT":
      return { title: "The device is too small for this", text: `${message}. A smaller model, or a shorter document, may fit.` };
    case "DEVICE_LOST":
      return { title: "The device was lost", text: "The browser took the GPU away. Reload the page: saved sessions are still there." };
    case "DEVICE":
      return { title: "The device reported an error", text: `${message}. Reload the page: saved sessions are still there.` };
    case "NOT_FOUND":
      return { title: "There is no model here", text: `${message}. The address after ?model= must be a folder with config.json, tokenizer.json and the weights.` };
    case "DOWNLOAD":
      return { title: "The download did not work", text: `${message}. Check the network and try again: it goes on where it stopped.` };
    case "QUOTA": {
      const needed = number(data["needed"]);
      return { title: "The browser's storage is full", text: `${needed === undefined ? "There is not enough room." : `${bytes(needed)} are needed.`} Delete sessions here, or data of other sites, and try again.` };
    }
    case "STORE":
      return { title: "The browser's storage cannot be used", text: `${message}. In a private window it may be off. What is read here lasts as long as the tab.` };
    case "CONTEXT": {
      const [needed, allowed] = [number(data["needed"]), number(data["allowed"])];
      const sizes = needed !== undefined && allowed !== undefined ? `It would be ${count(needed)} tokens, and this model holds ${count(allowed)}.` : message;
      return { title: "The text is too long", text: `${sizes} Take back a turn, or begin with a shorter document.` };
    }
    case "FINGERPRINT":
      return { title: "This session belongs to another model", text: `${message}. Open the page with the model that read it.` };
    case "SESSION_DAMAGED":
      return { title: "This session is damaged", text: `${message}. It cannot be opened; delete it and read the document again.` };
    case "NON_FINITE":
      return { title: "The model computed something that is no number", text: `${message}. Take the last turn back and ask in other words.` };
    case "WORKER":
    case "INTERNAL":
    case "ENGINE_CLOSED":
      return { title: "The engine has stopped", text: `${message}. Reload the page: saved sessions are still there.` };
    default:
      return { title: "That did not work", text: message };
  }
}
