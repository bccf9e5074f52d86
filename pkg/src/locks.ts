import { CedraError } from "./errors.js";

/** How long a lock is waited for: a page that is being reloaded gives its locks back a moment later. */
const PATIENCE_MS = 1000;

/** Locks of this thread. Web Locks would let it wait for itself. */
const held = new Set<string>();

/**
 * Makes this thread the one writer of a session until the result is called. Whoever comes second gets `SESSION_BUSY`. The lock
 * goes with the tab or worker that holds it, however that ends. Where the browser has no Web Locks, only this thread is looked at.
 */
export async function lockSession(store: string, name: string): Promise<() => void> {
  const key = `cedra/session/${store}/${name}`;
  const busy = (where: string): CedraError =>
    new CedraError("SESSION_BUSY", `session \`${name}\` is open in ${where}`, { session: name, store });
  if (held.has(key)) throw busy("this engine already");
  held.add(key);
  try {
    const release = await acquire(key, AbortSignal.timeout(PATIENCE_MS));
    return () => {
      held.delete(key);
      release();
    };
  } catch (thrown) {
    held.delete(key);
    const name = (thrown as { name?: unknown }).name;
    throw name === "TimeoutError" || name === "AbortError" ? busy("another tab or worker") : thrown;
  }
}

/** Waits for a Web Lock; the result gives it back. */
export function acquire(key: string, signal?: AbortSignal): Promise<() => void> {
  const locks = (globalThis.navigator as Navigator | undefined)?.locks as LockManager | undefined;
  if (!locks) return Promise.resolve(() => {});
  return new Promise((granted, refused) => {
    const hold = (): Promise<void> => new Promise((release) => granted(release));
    locks.request(key, signal ? { signal } : {}, hold).catch(refused);
  });
}
