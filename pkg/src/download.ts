import { type Depot, folderOf, MemoryDepot, openDepot } from "./depot.js";
import { aborted, CedraError } from "./errors.js";
import { acquire } from "./locks.js";
import type { LoadProgress } from "./protocol.js";
import { checkSafetensors, startsSafetensors } from "./safetensors.js";
import { sha256, Sha256 } from "./sha256.js";

/** Bytes of a download that are written at a time: what a cut download loses at most. */
const PIECE_BYTES = 8 << 20;
/** Tries in a row that bring nothing before a download is given up. */
const TRIES = 4;
/** Bytes that are hashed at a time. */
const HASH_BYTES = 4 << 20;
/** Entry that says that a file is whole and verified. */
const SEAL = "seal.json";
/** Entry that says that a loaded model's folder had no such file. */
const ABSENT = "absent";

/** A file that is whole and verified. */
interface Seal {
  url: string;
  /** Which of the server's versions it is. */
  version: string;
  sha256?: string;
}

/** What the server says of a file. */
interface Remote {
  version: string;
  /** Whether the version is one: without ETag and date, files of the same length look alike. */
  certain: boolean;
  size?: number;
}

export interface DownloadOptions {
  signal?: AbortSignal;
  onProgress?: (progress: LoadProgress) => void;
  /** Whether what is verified stays for the next visit. */
  cache: boolean;
}

/** The files of a model folder, downloaded or from the cache, every one verified. */
export async function downloadModel(
  base: string,
  options: DownloadOptions,
): Promise<{ files: Map<string, Blob>; kept: Depot["kind"] }> {
  const depot = options.cache ? await openDepot() : new MemoryDepot();
  return { files: await new Download(base, depot, options).model(), kept: depot.kind };
}

/** One model folder on its way. */
export class Download {
  readonly #waits: (ms: number) => Promise<void>;

  constructor(
    readonly base: string,
    readonly depot: Depot,
    readonly options: Omit<DownloadOptions, "cache">,
    waits = (ms: number): Promise<void> => new Promise((done) => setTimeout(done, ms)),
  ) {
    this.#waits = waits;
  }

  async model(): Promise<Map<string, Blob>> {
    const files = new Map<string, Blob>();
    const absent: string[] = [];
    const sums = await this.#checksums();
    const take = async (name: string): Promise<Blob | undefined> => {
      const blob = await this.small(name, sums.get(name));
      if (blob) files.set(name, blob);
      else absent.push(name);
      return blob;
    };
    if (!(await take("config.json"))) throw this.#error("NOT_FOUND", "config.json", "is not in the model folder", { status: 404 });
    await take("tokenizer.json");
    const index = await take("model.safetensors.index.json");
    const shards = index ? await shardsOf(index) : ["model.safetensors"];

    const remotes = await Promise.all(shards.map((name) => this.#head(name)));
    const sizes = remotes.map((remote) => remote?.size ?? 0);
    const total = (): number => sizes.reduce((sum, size) => sum + size, 0);
    let before = 0;
    for (const [i, name] of shards.entries()) {
      const report = (loaded: number, size?: number): void => {
        sizes[i] = Math.max(size ?? 0, loaded, sizes[i]!);
        this.options.onProgress?.({ stage: "download", file: name, loaded: before + loaded, total: total() });
      };
      const blob = await this.weights(name, sums.get(name), remotes[i], report);
      sizes[i] = blob.size;
      report(blob.size);
      before += blob.size;
      files.set(name, blob);
    }
    // A folder is whole without these. Without a network, nobody else could say so.
    for (const name of absent) await this.#forget(name);
    return files;
  }

  /** Remembers that there is no such file; one that there was goes. */
  async #forget(name: string): Promise<void> {
    const folder = folderOf(this.#url(name));
    await this.depot.remove(folder, SEAL);
    await this.#write(folder, ABSENT, new TextEncoder().encode("{}"), name);
  }

  /**
   * A JSON file: from the network, or what there was last when the network does not have it. `undefined` where there is none, or was
   * none when the model was last loaded.
   */
  async small(name: string, sum?: string): Promise<Blob | undefined> {
    const folder = folderOf(this.#url(name));
    try {
      const response = await this.#fetch(name, { cache: "no-cache" });
      if (response.status === 404 || response.status === 410) return undefined;
      this.#checkAnswer(name, response);
      const bytes = await this.#whole(name, response);
      try {
        JSON.parse(new TextDecoder().decode(bytes));
      } catch (cause) {
        throw this.#error("DOWNLOAD", name, "is not JSON", { received: bytes.length }, cause);
      }
      if (sum) {
        const found = new Sha256().update(bytes).hex();
        if (found !== sum) throw this.#error("DOWNLOAD", name, "does not have its hash", { found, expected: sum });
      }
      await this.#write(folder, SEAL, bytes, name);
      await this.depot.remove(folder, ABSENT);
      return new Blob([bytes]);
    } catch (thrown) {
      if (!(thrown instanceof CedraError) || thrown.code !== "DOWNLOAD") throw thrown;
      const kept = await this.depot.read(folder, SEAL);
      if (kept && (!sum || (await this.#hash(name, kept, false)) === sum)) return kept;
      if (!kept && !sum && (await this.depot.read(folder, ABSENT))) return undefined;
      throw thrown;
    }
  }

  /** A safetensors file: the kept one if the server has no other, else downloaded from where the last try stopped. */
  async weights(
    name: string,
    sum: string | undefined,
    remote: Remote | undefined,
    report: (loaded: number, size?: number) => void,
  ): Promise<Blob> {
    const { signal } = this.options;
    const folder = folderOf(this.#url(name));
    // Two tabs that want the same file download it once.
    const release = await acquire(`cedra/download/${folder}`, signal);
    try {
      const kept = await this.#kept(folder, sum, remote);
      if (kept) return kept;
      for (let again = false; ; again = true) {
        const { blob, version, resumed } = await this.#receive(folder, name, report);
        try {
          return await this.#seal(folder, name, blob, version, sum);
        } catch (thrown) {
          if (!(thrown instanceof CedraError) || thrown.code !== "DOWNLOAD") throw thrown;
          // What does not verify goes. Pieces of several tries may not belong together: once more from the beginning.
          await this.#drop(folder, version);
          if (!resumed || again) throw thrown;
        }
      }
    } finally {
      release();
    }
  }

  async #kept(folder: string, sum: string | undefined, remote: Remote | undefined): Promise<Blob | undefined> {
    const seal = await this.#readSeal(folder);
    if (!seal || (remote && remote.version !== seal.version) || (sum && sum !== seal.sha256)) return undefined;
    const { blob } = await this.#pieces(folder, seal.version);
    try {
      await checkSafetensors(blob);
      return blob;
    } catch {
      await this.depot.remove(folder);
      return undefined;
    }
  }

  async #readSeal(folder: string): Promise<Seal | undefined> {
    try {
      return JSON.parse((await (await this.depot.read(folder, SEAL))?.text()) ?? "null") ?? undefined;
    } catch {
      return undefined;
    }
  }

  /** The pieces of a version as far as they follow each other. */
  async #pieces(folder: string, version: string): Promise<{ blob: Blob; names: string[] }> {
    const prefix = `${version}-`;
    const entries = [...(await this.depot.list(folder))].filter(([entry]) => entry.startsWith(prefix)).sort();
    const parts: Blob[] = [];
    const names: string[] = [];
    let at = 0;
    for (const [entry, size] of entries) {
      const part = Number(entry.slice(prefix.length)) === at && size > 0 ? await this.depot.read(folder, entry) : undefined;
      if (!part || part.size !== size) break;
      parts.push(part);
      names.push(entry);
      at += size;
    }
    return { blob: new Blob(parts), names };
  }

  /** Downloads what is missing of a file. */
  async #receive(
    folder: string,
    name: string,
    report: (loaded: number, size?: number) => void,
  ): Promise<{ blob: Blob; version: string; resumed: boolean }> {
    const { signal } = this.options;
    let { version, at } = await this.#partial(folder);
    let resumed = at > 0;
    let total: number | undefined;
    let failure: unknown;
    for (let vain = 0; vain < TRIES; vain++) {
      if (vain > 0) await this.#waits(250 * 2 ** (vain - 1));
      if (signal?.aborted) throw aborted(signal);
      const from: number = at;
      let response: Response;
      try {
        response = await this.#fetch(name, { cache: "no-store", headers: from > 0 ? { range: `bytes=${from}-` } : {} });
        if (response.status >= 500 || response.status === 429) this.#checkAnswer(name, response);
      } catch (thrown) {
        if (signal?.aborted) throw aborted(signal);
        failure = thrown;
        continue;
      }
      const remote = remoteOf(response);
      const range = rangeOf(response);
      const fits = response.status === 206 && range?.start === from && remote.certain && remote.version === version;
      if (from > 0 && !fits && (response.status === 416 || response.status === 206)) {
        // The server cannot go on from there, or not with the same file.
        await response.body?.cancel();
        await this.#drop(folder, version);
        [at, version, resumed] = [0, undefined, false];
        continue;
      }
      this.#checkAnswer(name, response);
      if (!fits) {
        await this.#drop(folder, version);
        [at, version, resumed] = [0, remote.version, false];
      }
      total = range?.total ?? remote.size;
      await this.#checkRoom(name, total === undefined ? undefined : total - at);
      const done = await this.#body(response, folder, name, version!, at, total, report);
      at = done.at;
      if (done.whole) return { blob: (await this.#pieces(folder, version!)).blob, version: version!, resumed };
      failure = done.failure;
      resumed ||= at > 0;
      if (at > from) vain = 0;
      if (!remote.certain) {
        await this.#drop(folder, version);
        [at, version, resumed] = [0, undefined, false];
      }
    }
    const data = { received: at, expected: total, tries: TRIES, ...(failure instanceof CedraError ? failure.data : {}) };
    throw this.#error("DOWNLOAD", name, `was cut after ${at} bytes`, data, failure);
  }

  /** Writes a body away, piece by piece, as far as it comes. */
  async #body(
    response: Response,
    folder: string,
    name: string,
    version: string,
    start: number,
    total: number | undefined,
    report: (loaded: number, size?: number) => void,
  ): Promise<{ at: number; whole: boolean; failure?: unknown }> {
    const { signal } = this.options;
    const piece = new Uint8Array(PIECE_BYTES);
    let filled = 0;
    let at = start;
    const flush = async (): Promise<void> => {
      if (filled === 0) return;
      const entry = `${version}-${String(at).padStart(15, "0")}`;
      await this.#write(folder, entry, piece.slice(0, filled), name, Math.max(filled, (total ?? 0) - at));
      at += filled;
      filled = 0;
    };
    const reader = response.body!.getReader();
    try {
      for (;;) {
        let chunk: ReadableStreamReadResult<Uint8Array>;
        try {
          chunk = await reader.read();
        } catch (failure) {
          await flush();
          if (signal?.aborted) throw aborted(signal);
          return { at, whole: false, failure };
        }
        if (chunk.done) break;
        for (let rest = chunk.value; rest.length > 0; ) {
          const part = rest.subarray(0, PIECE_BYTES - filled);
          piece.set(part, filled);
          filled += part.length;
          rest = rest.subarray(part.length);
          // The first bytes already tell weights from a page.
          if (at === 0 && filled >= 9 && filled - part.length < 9 && !startsSafetensors(piece)) {
            throw this.#error("DOWNLOAD", name, "is not a safetensors file");
          }
          if (filled === PIECE_BYTES) await flush();
        }
        report(at + filled, total);
      }
      await flush();
      return { at, whole: total === undefined || at === total };
    } finally {
      await reader.cancel().catch(() => {});
    }
  }

  /** The version and length of what an earlier try has left. */
  async #partial(folder: string): Promise<{ version: string | undefined; at: number }> {
    const sealed = (await this.#readSeal(folder))?.version;
    const versions = new Set<string>();
    for (const entry of (await this.depot.list(folder)).keys()) {
      const version = entry.slice(0, entry.lastIndexOf("-"));
      if (entry !== SEAL && version !== sealed) versions.add(version);
    }
    const [version] = versions;
    if (version === undefined) return { version: undefined, at: 0 };
    for (const other of versions) if (other !== version) await this.#drop(folder, other);
    const { blob, names } = await this.#pieces(folder, version);
    for (const entry of (await this.depot.list(folder)).keys()) {
      if (entry.startsWith(`${version}-`) && !names.includes(entry)) await this.depot.remove(folder, entry);
    }
    return { version, at: blob.size };
  }

  async #seal(folder: string, name: string, blob: Blob, version: string, sum: string | undefined): Promise<Blob> {
    try {
      await checkSafetensors(blob);
    } catch (cause) {
      throw this.#error("DOWNLOAD", name, (cause as Error).message, { received: blob.size }, cause);
    }
    if (sum) {
      const found = await this.#hash(name, blob, true);
      if (found !== sum) throw this.#error("DOWNLOAD", name, "does not have its hash", { found, expected: sum });
    }
    const seal: Seal = { url: this.#url(name), version, ...(sum ? { sha256: sum } : {}) };
    await this.#write(folder, SEAL, new TextEncoder().encode(JSON.stringify(seal)), name);
    for (const entry of (await this.depot.list(folder)).keys()) {
      if (entry !== SEAL && !entry.startsWith(`${version}-`)) await this.depot.remove(folder, entry);
    }
    return blob;
  }

  async #hash(name: string, blob: Blob, report: boolean): Promise<string> {
    const hash = new Sha256();
    for (let at = 0; at < blob.size; at += HASH_BYTES) {
      if (this.options.signal?.aborted) throw aborted(this.options.signal);
      hash.update(new Uint8Array(await blob.slice(at, at + HASH_BYTES).arrayBuffer()));
      if (report) this.options.onProgress?.({ stage: "verify", file: name, loaded: Math.min(at + HASH_BYTES, blob.size), total: blob.size });
    }
    return hash.hex();
  }

  /** The hashes of `checksums.json`, where the folder has one. Some servers answer everything with a page: that is none. */
  async #checksums(): Promise<Map<string, string>> {
    const name = "checksums.json";
    const response = await this.#fetch(name, { cache: "no-cache" }).catch((thrown: unknown) => {
      if (this.options.signal?.aborted) throw thrown;
      return undefined;
    });
    const folder = folderOf(this.#url(name));
    let text: string | undefined;
    if (response?.ok && !isPage(response)) {
      text = new TextDecoder().decode(await this.#whole(name, response));
    } else if (!response || response.status >= 500) {
      text = await (await this.depot.read(folder, SEAL))?.text();
    }
    if (text === undefined) return new Map();
    let entries: [string, unknown][];
    try {
      entries = Object.entries(JSON.parse(text) as object);
    } catch (cause) {
      throw this.#error("DOWNLOAD", name, "is not JSON", { received: text.length }, cause);
    }
    for (const [file, sum] of entries) {
      if (typeof sum !== "string" || !/^[0-9a-f]{64}$/.test(sum)) {
        throw this.#error("DOWNLOAD", name, `has no SHA-256 in hexadecimal digits for ${file}`, { found: String(sum) });
      }
    }
    await this.#write(folder, SEAL, new TextEncoder().encode(text), name);
    return new Map(entries as [string, string][]);
  }

  /** What the server says of a file, without its bytes. `undefined` when it says nothing that can be used. */
  async #head(name: string): Promise<Remote | undefined> {
    try {
      const response = await this.#fetch(name, { method: "HEAD", cache: "no-store" });
      const remote = response.ok && !isPage(response) ? remoteOf(response) : undefined;
      return remote?.certain ? remote : undefined;
    } catch (thrown) {
      if (this.options.signal?.aborted) throw thrown;
      return undefined;
    }
  }

  async #fetch(name: string, init: RequestInit): Promise<Response> {
    const { signal } = this.options;
    try {
      return await fetch(this.#url(name), signal ? { ...init, signal } : init);
    } catch (thrown) {
      throw signal?.aborted ? aborted(signal) : this.#network(name, thrown);
    }
  }

  async #whole(name: string, response: Response): Promise<Uint8Array<ArrayBuffer>> {
    try {
      return new Uint8Array(await response.arrayBuffer());
    } catch (thrown) {
      throw this.#network(name, thrown);
    }
  }

  #network(name: string, cause: unknown): CedraError {
    if (this.options.signal?.aborted) return aborted(this.options.signal);
    return this.#error("DOWNLOAD", name, "could not be fetched", {}, cause);
  }

  #checkAnswer(name: string, response: Response): void {
    const { status } = response;
    if (status === 404 || status === 410) throw this.#error("NOT_FOUND", name, "is not in the model folder", { status });
    if (!response.ok) throw this.#error("DOWNLOAD", name, `was refused with status ${status}`, { status });
    if (isPage(response)) throw this.#error("DOWNLOAD", name, "came as an HTML page", { status, found: "text/html" });
  }

  #error(code: "DOWNLOAD" | "NOT_FOUND", name: string, problem: string, data: Record<string, unknown> = {}, cause?: unknown): CedraError {
    return new CedraError(code, `${this.#url(name)} ${problem}`, { file: name, url: this.#url(name), ...data }, cause);
  }

  #url(name: string): string {
    return new URL(name, this.base).href;
  }

  async #drop(folder: string, version: string | undefined): Promise<void> {
    if (version === undefined) return;
    for (const entry of (await this.depot.list(folder)).keys()) {
      if (entry.startsWith(`${version}-`)) await this.depot.remove(folder, entry);
    }
  }

  async #write(folder: string, entry: string, bytes: Uint8Array<ArrayBuffer>, name: string, needed = bytes.length): Promise<void> {
    try {
      await this.depot.write(folder, entry, bytes);
    } catch (thrown) {
      if ((thrown as { name?: unknown } | null)?.name !== "QuotaExceededError") throw thrown;
      const available = await room();
      // Some browsers say much more than they grant. Then nobody knows.
      throw this.#quota(name, needed, available !== undefined && available < needed ? available : undefined, thrown);
    }
  }

  async #checkRoom(name: string, needed: number | undefined): Promise<void> {
    if (needed === undefined || this.depot.kind === "memory") return;
    const available = await room();
    if (available !== undefined && available < needed) throw this.#quota(name, needed, available);
  }

  #quota(what: string, needed: number, available: number | undefined, cause?: unknown): CedraError {
    const rest = available === undefined ? "and there are fewer" : `${available} are available`;
    return new CedraError("QUOTA", `${what} needs ${needed} bytes of the browser's storage, ${rest}`, { needed, available }, cause);
  }
}

/** Bytes that the browser still grants, where it says so. */
export async function room(): Promise<number | undefined> {
  const { quota, usage } = (await globalThis.navigator?.storage?.estimate?.().catch(() => undefined)) ?? {};
  return quota === undefined || usage === undefined ? undefined : Math.max(0, quota - usage);
}

async function shardsOf(index: Blob): Promise<string[]> {
  const { weight_map: map } = JSON.parse(await index.text()) as { weight_map?: Record<string, string> };
  const names = [...new Set(Object.values(map ?? {}))].sort();
  // A name is one of this folder: no way out of it.
  const bad = names.find((name) => typeof name !== "string" || !/^[^/\\]+\.safetensors$/.test(name));
  if (names.length === 0 || bad !== undefined) {
    throw new CedraError("MALFORMED", `model.safetensors.index.json: ${bad === undefined ? "names no files" : `names \`${bad}\``}`, { found: bad });
  }
  return names;
}

const isPage = (response: Response): boolean => /^(text\/html|application\/xhtml)/i.test(response.headers.get("content-type") ?? "");

function remoteOf(response: Response): Remote {
  const { headers } = response;
  const encoded = headers.get("content-encoding");
  const length = encoded && encoded !== "identity" ? null : headers.get("content-length");
  const size = rangeOf(response)?.total ?? (length === null || response.status === 206 ? undefined : Number(length));
  const stamp = headers.get("etag") ?? headers.get("last-modified");
  const version = sha256(stamp ?? `size ${size}`).slice(0, 16);
  return { version, certain: stamp !== null, ...(size === undefined ? {} : { size }) };
}

function rangeOf(response: Response): { start: number; total: number } | undefined {
  const match = /^bytes (\d+)-\d+\/(\d+)$/.exec(response.headers.get("content-range") ?? "");
  return match ? { start: Number(match[1]), total: Number(match[2]) } : undefined;
}
