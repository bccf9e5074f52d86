import { sha256 } from "./sha256.js";

/**
 * Where downloads are kept: folders of entries. A file is several entries, so that what is here of a cut download stays, and a
 * `Blob` made of them costs no copy. An entry is written as a whole or, should the browser die, has the wrong length.
 */
export interface Depot {
  readonly kind: "opfs" | "cache" | "memory";
  /** The entries of a folder with their sizes. */
  list(folder: string): Promise<Map<string, number>>;
  read(folder: string, entry: string): Promise<Blob | undefined>;
  write(folder: string, entry: string, bytes: Uint8Array<ArrayBuffer>): Promise<void>;
  /** Removes one entry, or the folder. */
  remove(folder: string, entry?: string): Promise<void>;
}

/** The best depot that this browser grants: OPFS, else the Cache API, else memory. */
export async function openDepot(): Promise<Depot> {
  for (const open of [OpfsDepot.open, CacheDepot.open]) {
    try {
      const depot = await open();
      // Some browsers refuse at the first write only. Each tab writes a name of its own, and the folder stays: else two that open at
      // the same moment would take each other's for a refusal.
      const probe = crypto.randomUUID();
      await depot.write("probe", probe, new Uint8Array([1]));
      await depot.remove("probe", probe);
      return depot;
    } catch {
      // Denied, or not there: the next one.
    }
  }
  return new MemoryDepot();
}

const notFound = (thrown: unknown): boolean => (thrown as { name?: unknown } | null)?.name === "NotFoundError";

/** Workers have it; the types of pages do not. */
interface SyncAccess {
  write(bytes: Uint8Array, options?: { at: number }): number;
  truncate(size: number): void;
  flush(): void;
  close(): void;
}

/** The origin private file system, folder `cedra`. */
export class OpfsDepot implements Depot {
  readonly kind = "opfs";

  private constructor(readonly root: FileSystemDirectoryHandle) {}

  static async open(this: void): Promise<OpfsDepot> {
    const top = await navigator.storage.getDirectory();
    return new OpfsDepot(await top.getDirectoryHandle("cedra", { create: true }));
  }

  async #folder(folder: string): Promise<FileSystemDirectoryHandle | undefined> {
    try {
      return await this.root.getDirectoryHandle(folder);
    } catch (thrown) {
      if (notFound(thrown)) return undefined;
      throw thrown;
    }
  }

  async list(folder: string): Promise<Map<string, number>> {
    const sizes = new Map<string, number>();
    const handle = await this.#folder(folder);
    if (!handle) return sizes;
    for await (const [name, entry] of handle.entries()) {
      if (entry.kind === "file") sizes.set(name, (await (entry as FileSystemFileHandle).getFile()).size);
    }
    return sizes;
  }

  async read(folder: string, entry: string): Promise<Blob | undefined> {
    const handle = await this.#folder(folder);
    try {
      return await (await handle?.getFileHandle(entry))?.getFile();
    } catch (thrown) {
      if (notFound(thrown)) return undefined;
      throw thrown;
    }
  }

  async write(folder: string, entry: string, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    const handle = await this.root.getDirectoryHandle(folder, { create: true });
    const file = await handle.getFileHandle(entry, { create: true });
    try {
      if ("createWritable" in file) {
        const stream = await file.createWritable();
        await stream.write(bytes);
        await stream.close();
        return;
      }
      const access = await (file as { createSyncAccessHandle(): Promise<SyncAccess> }).createSyncAccessHandle();
      try {
        access.truncate(0);
        const written = access.write(bytes, { at: 0 });
        if (written < bytes.length) throw new DOMException("the disk is full", "QuotaExceededError");
        access.flush();
      } finally {
        access.close();
      }
    } catch (thrown) {
      await this.remove(folder, entry).catch(() => {});
      throw thrown;
    }
  }

  async remove(folder: string, entry?: string): Promise<void> {
    try {
      if (entry === undefined) await this.root.removeEntry(folder, { recursive: true });
      else await (await this.#folder(folder))?.removeEntry(entry);
    } catch (thrown) {
      if (!notFound(thrown)) throw thrown;
    }
  }
}

/** The Cache API, cache `cedra`. Its URLs are made up and never fetched. */
export class CacheDepot implements Depot {
  readonly kind = "cache";

  private constructor(readonly cache: Cache) {}

  static async open(this: void): Promise<CacheDepot> {
    return new CacheDepot(await caches.open("cedra"));
  }

  static #url(folder: string, entry = ""): string {
    return `https://cedra.invalid/${folder}/${entry}`;
  }

  async list(folder: string): Promise<Map<string, number>> {
    const sizes = new Map<string, number>();
    const prefix = CacheDepot.#url(folder);
    for (const { url } of await this.cache.keys()) {
      if (!url.startsWith(prefix)) continue;
      const size = (await this.cache.match(url))?.headers.get("content-length");
      sizes.set(url.slice(prefix.length), Number(size));
    }
    return sizes;
  }

  async read(folder: string, entry: string): Promise<Blob | undefined> {
    return (await this.cache.match(CacheDepot.#url(folder, entry)))?.blob();
  }

  async write(folder: string, entry: string, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    const headers = { "content-length": String(bytes.length) };
    await this.cache.put(CacheDepot.#url(folder, entry), new Response(bytes, { headers }));
  }

  async remove(folder: string, entry?: string): Promise<void> {
    if (entry !== undefined) await this.cache.delete(CacheDepot.#url(folder, entry));
    else for (const name of (await this.list(folder)).keys()) await this.remove(folder, name);
  }
}

/** Memory: what is downloaded lives as long as the engine. */
export class MemoryDepot implements Depot {
  readonly kind = "memory";
  readonly #folders = new Map<string, Map<string, Blob>>();

  async list(folder: string): Promise<Map<string, number>> {
    return new Map([...(this.#folders.get(folder) ?? [])].map(([name, blob]) => [name, blob.size]));
  }

  async read(folder: string, entry: string): Promise<Blob | undefined> {
    return this.#folders.get(folder)?.get(entry);
  }

  async write(folder: string, entry: string, bytes: Uint8Array<ArrayBuffer>): Promise<void> {
    const entries = this.#folders.get(folder) ?? new Map<string, Blob>();
    this.#folders.set(folder, entries.set(entry, new Blob([bytes])));
  }

  async remove(folder: string, entry?: string): Promise<void> {
    if (entry === undefined) this.#folders.delete(folder);
    else this.#folders.get(folder)?.delete(entry);
  }
}

/** The folder of a file from the network. */
export const folderOf = (url: string): string => sha256(url).slice(0, 32);
