import { asCedraError, CedraError } from "./errors.js";
import type { RecoveredSession, RecoverProgress } from "./protocol.js";
import type { WasmEngine, WasmSession, WasmStore } from "./wasm.js";

// What an engine's sessions become on another device. The device is gone, but their tokens are known here, and stores have what was
// saved in them.

/** A session of the engine that is lost. */
export interface Lost {
  readonly wasm: WasmSession;
  /** Where it is saved, if it has been. */
  readonly saved?: { store: WasmStore; name: string };
  readonly name?: string;
  /** How its text was read last. */
  readonly prefill?: string;
}

/** The same session on the new device. */
export interface Found {
  wasm: WasmSession;
  /** Whether the store has it as it is. */
  persisted: boolean;
  report: RecoveredSession;
}

/** Makes a session of `engine` with the text of one that is lost. */
export async function bringBack(
  engine: WasmEngine,
  lost: Lost,
  { signal, onProgress }: { signal?: AbortSignal; onProgress?: (progress: RecoverProgress) => void },
): Promise<Found> {
  const text = lost.wasm.tokens;
  const { name, prefill = "bounded" } = lost;
  const wasm = (await reopened(engine, lost)) ?? (await engine.session());
  try {
    const kept = common(wasm.tokens, text);
    const persisted = lost.saved !== undefined && kept === text.length && wasm.length === kept;
    if (wasm.length > kept) await wasm.truncate(kept, prefill === "bounded" ? "bounded" : "exact");
    const rest = text.subarray(kept);
    if (rest.length > 0) {
      // Pages of another session's prefix would make an approximate state of an exact one.
      const reuse = prefill === "bounded";
      const tell = (done: number, total: number): void => onProgress?.({ stage: "read", ...(name !== undefined && { name }), done, total });
      await wasm.append(rest, { prefill, reuse, onProgress: tell, ...(signal && { signal }) });
    }
    return { wasm, persisted, report: { ...(name !== undefined && { name }), tokens: text.length, reread: rest.length } };
  } catch (thrown) {
    wasm.close();
    throw thrown;
  }
}

/** What its store has of a session, unless it has nothing or nothing that can be read: the text is known all the same. */
async function reopened(engine: WasmEngine, { saved }: Lost): Promise<WasmSession | undefined> {
  if (!saved) return undefined;
  try {
    return await engine.open(saved.store, saved.name);
  } catch (thrown) {
    if (UNREADABLE.has(asCedraError(thrown).code)) return undefined;
    throw thrown;
  }
}

const UNREADABLE: ReadonlySet<CedraError["code"]> = new Set(["NO_SESSION", "SESSION_DAMAGED", "STORE"]);

/** Tokens that two texts have in common at their beginning. */
function common(a: Uint32Array, b: Uint32Array): number {
  const end = Math.min(a.length, b.length);
  let length = 0;
  while (length < end && a[length] === b[length]) length++;
  return length;
}
