import { CedraError } from "./errors.js";

// What Node and Deno lack or do otherwise than a browser. Nothing here runs in one.

/** What this needs of `node:fs`, which Deno has too. */
interface Files {
  openAsBlob?(path: string | URL): Promise<Blob>;
  promises: {
    readFile(path: string | URL): Promise<Uint8Array<ArrayBuffer>>;
    readdir(path: string | URL): Promise<string[]>;
  };
}

/** The file system, where there is one. Bundlers do not see this as an import. */
function fileSystem(): Files | undefined {
  const { process } = globalThis as { process?: { getBuiltinModule?(name: string): unknown } };
  return process?.getBuiltinModule?.("node:fs") as Files | undefined;
}

/** Whether an engine gets a thread of its own unless told otherwise. A folder's files cannot be sent to a worker of Deno. */
export const prefersWorker = (): boolean => typeof Worker !== "undefined" && !fileSystem();

/** The file or folder that a URL or a path names, if it is one of this machine and can be read. */
export function localFile(place: string | URL): URL | undefined {
  if (!fileSystem()) return undefined;
  const text = String(place);
  // A drive's letter is no scheme.
  if (/^[a-z][a-z0-9+.-]+:/i.test(text)) return text.startsWith("file:") ? new URL(text) : undefined;
  const { process } = globalThis as unknown as { process: { getBuiltinModule(name: "node:url"): { pathToFileURL(path: string): URL } } };
  return process.getBuiltinModule("node:url").pathToFileURL(text);
}

/** Whether a model's folder has a use for a file. */
export type Wanted = (name: string) => boolean;

/** The files of a folder, by name. They are read when they are needed, where that is possible. */
export async function readFolder(folder: URL, wanted: Wanted): Promise<Map<string, Blob>> {
  const fs = fileSystem()!;
  const base = folder.href.endsWith("/") ? folder.href : `${folder.href}/`;
  try {
    const names = (await fs.promises.readdir(folder)).filter(wanted);
    return new Map(await Promise.all(names.map(async (name) => [name, await blobOf(fs, new URL(encodeURIComponent(name), base))] as const)));
  } catch (cause) {
    const missing = (cause as { code?: unknown }).code === "ENOENT";
    throw new CedraError(missing ? "NOT_FOUND" : "IO", `${folder.href} could not be read`, { path: folder.href }, cause);
  }
}

async function blobOf(fs: Files, file: URL): Promise<Blob> {
  return (await fs.openAsBlob?.(file)) ?? new Blob([await fs.promises.readFile(file)]);
}

/** The bytes of a file of this machine. */
export async function readLocal(file: URL): Promise<Uint8Array<ArrayBuffer>> {
  return fileSystem()!.promises.readFile(file);
}

/** Makes good what the wasm looks for in the global scope. */
export function prepareScope(): void {
  if (!fileSystem()) return;
  const scope = globalThis as Record<string, unknown>;
  // It wants to know whether this is a page or a worker. It is like a worker: there is no window.
  if (scope["Window"] === undefined && scope["WorkerGlobalScope"] === undefined) {
    scope["WorkerGlobalScope"] = class {
      static [Symbol.hasInstance](value: unknown): boolean {
        return value === globalThis;
      }
    };
  }
  const gpu = (scope["navigator"] as { gpu?: { wgslLanguageFeatures?: Iterable<string> & { keys?(): unknown } } } | undefined)?.gpu;
  const features = gpu?.wgslLanguageFeatures;
  // Dawn's binding gives no iterator here.
  if (features && typeof (features.keys?.() as { next?: unknown } | undefined)?.next !== "function") {
    Object.defineProperty(gpu, "wgslLanguageFeatures", { value: new Set(features), configurable: true });
  }
}
