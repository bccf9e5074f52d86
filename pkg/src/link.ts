import { aborted, CedraError, fromWire } from "./errors.js";
import { acquire } from "./locks.js";
import type { Args, FromWorker, Hooks, Link, Method, Result, ToWorker } from "./protocol.js";

/** What this needs of a worker. */
export interface WorkerLike {
  postMessage(message: ToWorker): void;
  addEventListener(type: "message", listener: (event: MessageEvent<FromWorker>) => void): void;
  addEventListener(type: "error" | "messageerror", listener: (event: Event) => void): void;
  terminate(): void;
}

interface Pending {
  resolve: (result: never) => void;
  reject: (error: CedraError) => void;
  onProgress: ((progress: never) => void) | undefined;
  done: () => void;
}

/** The way to an engine in a worker. When the worker ends, however it does, everything that waits is rejected. */
export class WorkerLink implements Link {
  readonly #pending = new Map<number, Pending>();
  readonly #watch = new AbortController();
  #numbers = 0;
  #end: CedraError | undefined;

  constructor(readonly worker: WorkerLike) {
    worker.addEventListener("message", ({ data }) => this.#receive(data));
    worker.addEventListener("error", (event) => {
      const { message, error } = event as ErrorEvent;
      this.#fail(new CedraError("WORKER", `the engine's worker failed: ${message || "its script did not load"}`, {}, error));
    });
    worker.addEventListener("messageerror", () => this.#fail(new CedraError("WORKER", "a message could not be read")));
    this.#alive = `cedra/alive/${crypto.randomUUID()}`;
    worker.postMessage({ type: "hello", alive: this.#alive });
  }

  readonly #alive: string;

  call<M extends Method>(method: M, args: Args<M>, { signal, onProgress }: Hooks<M> = {}): Promise<Result<M>> {
    if (this.#end) return Promise.reject(this.#end);
    if (signal?.aborted) return Promise.reject(aborted(signal));
    const id = ++this.#numbers;
    return new Promise((resolve, reject) => {
      const abort = (): void => this.worker.postMessage({ type: "abort", id });
      signal?.addEventListener("abort", abort);
      const done = (): void => signal?.removeEventListener("abort", abort);
      const fail = (error: CedraError): void => {
        // The worker knows nothing of the reason.
        reject(error.code === "ABORTED" && signal?.aborted ? new CedraError("ABORTED", error.message, error.data, signal.reason) : error);
      };
      this.#pending.set(id, { resolve, reject: fail, onProgress: onProgress as Pending["onProgress"], done });
      try {
        this.worker.postMessage({ type: "call", id, method, args, progress: onProgress !== undefined });
      } catch (cause) {
        this.#pending.delete(id);
        done();
        reject(new CedraError("ARGUMENT", `an argument of ${method} cannot be sent to the worker`, {}, cause));
      }
    });
  }

  close(): void {
    this.#fail(new CedraError("ENGINE_CLOSED", "the engine is closed"));
  }

  #receive(message: FromWorker): void {
    if (message.type === "ready") void this.#mourn();
    else if (message.type === "crashed") this.#fail(fromWire(message.error));
    else {
      const pending = this.#pending.get(message.id);
      if (message.type === "progress") pending?.onProgress?.(message.progress as never);
      else {
        this.#pending.delete(message.id);
        pending?.done();
        if (message.type === "done") pending?.resolve(message.result as never);
        else pending?.reject(fromWire(message.error));
      }
    }
  }

  /** Waits for the lock that the worker holds while it lives: a worker that is killed sends no event. */
  async #mourn(): Promise<void> {
    if (!globalThis.navigator?.locks) return;
    try {
      (await acquire(this.#alive, this.#watch.signal))();
    } catch {
      return; // Closed from this side.
    }
    this.#fail(new CedraError("WORKER", "the engine's worker has ended"));
  }

  #fail(error: CedraError): void {
    if (this.#end) return;
    this.#end = error;
    this.#watch.abort();
    this.worker.terminate();
    for (const { reject, done } of this.#pending.values()) {
      done();
      reject(error);
    }
    this.#pending.clear();
  }
}
