import { toWire } from "./errors.js";
import { Host } from "./host.js";
import { acquire } from "./locks.js";
import type { FromWorker, Hooks, Method, ToWorker } from "./protocol.js";

/** What this needs of a worker's global scope. */
export interface Scope {
  postMessage(message: FromWorker, transfer?: Transferable[]): void;
  addEventListener(type: "message", listener: (event: MessageEvent<ToWorker>) => void): void;
  addEventListener(type: "error", listener: (event: ErrorEvent) => void): void;
  addEventListener(type: "unhandledrejection", listener: (event: PromiseRejectionEvent) => void): void;
}

/** Answers a page's calls, each with one reply, in the order in which they end. */
export function serve(scope: Scope, host: Pick<Host, "call"> = new Host()): void {
  const running = new Map<number, AbortController>();

  const answer = async ({ id, method, args, progress }: Extract<ToWorker, { type: "call" }>): Promise<void> => {
    const abort = new AbortController();
    running.set(id, abort);
    const hooks: Hooks<Method> = { signal: abort.signal };
    if (progress) hooks.onProgress = (progress) => scope.postMessage({ type: "progress", id, progress });
    try {
      const result = await host.call(method, args as never, hooks as never);
      const transfer = result instanceof Uint32Array && ownsBuffer(result) ? [result.buffer as ArrayBuffer] : [];
      scope.postMessage({ type: "done", id, result }, transfer);
    } catch (thrown) {
      scope.postMessage({ type: "failed", id, error: toWire(thrown) });
    } finally {
      running.delete(id);
    }
  };

  scope.addEventListener("message", ({ data }) => {
    if (data.type === "call") void answer(data);
    else if (data.type === "abort") running.get(data.id)?.abort();
    // The lock says for as long as it is held that this thread lives.
    else void acquire(data.alive).then(() => scope.postMessage({ type: "ready" }));
  });

  // A trap of the wasm in a task of its own rejects nothing that anybody waits for.
  scope.addEventListener("error", (event) => scope.postMessage({ type: "crashed", error: toWire(event.error ?? event.message) }));
  scope.addEventListener("unhandledrejection", ({ reason }) => {
    if (reason instanceof WebAssembly.RuntimeError) scope.postMessage({ type: "crashed", error: toWire(reason) });
  });
}

/** An array over the wasm's memory must not be given away. */
const ownsBuffer = (array: Uint32Array): boolean => array.byteLength === array.buffer.byteLength;

// As a worker's script it serves; imported elsewhere it only has the function.
if (typeof document === "undefined" && "postMessage" in globalThis && "importScripts" in globalThis) {
  serve(globalThis as unknown as Scope);
}
