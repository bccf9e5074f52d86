import { CedraError } from "./errors.js";
import { localFile, readFolder } from "./runtime.js";

/** Where a model comes from: the URL of its folder, in Node and Deno also its path, or its files. */
export type ModelSource = string | URL | FileList | readonly File[] | FileSystemDirectoryHandle | ReadonlyMap<string, Blob>;

/** The source in a form that can be sent to a worker. */
export async function resolveSource(source: ModelSource): Promise<{ url: string } | { files: Map<string, Blob> }> {
  if (typeof source === "string" || source instanceof URL) {
    const folder = localFile(source);
    return folder ? { files: complete(await readFolder(folder, wanted)) } : { url: folderUrl(source) };
  }
  const files = new Map<string, Blob>();
  if (source instanceof Map) {
    for (const [name, blob] of source) files.set(name, blob);
  } else if (isDirectory(source)) {
    for await (const [name, handle] of source.entries()) {
      if (handle.kind === "file" && wanted(name)) files.set(name, await (handle as FileSystemFileHandle).getFile());
    }
  } else {
    for (const file of Array.from(source as ArrayLike<File>)) if (wanted(file.name)) files.set(file.name, file);
  }
  return { files: complete(files) };
}

function complete(files: Map<string, Blob>): Map<string, Blob> {
  if (files.has("config.json")) return files;
  throw new CedraError("NOT_FOUND", "config.json is not among the files", { files: [...files.keys()] });
}

/** `config.json` of a source, and nothing else of it. */
export async function configOf(source: ModelSource, signal?: AbortSignal): Promise<string> {
  const resolved = await resolveSource(source);
  if ("files" in resolved) return resolved.files.get("config.json")!.text();
  const url = new URL("config.json", resolved.url).href;
  let response: Response;
  try {
    response = await fetch(url, signal ? { signal } : {});
  } catch (cause) {
    if (signal?.aborted) throw new CedraError("ABORTED", "aborted", {}, cause);
    throw new CedraError("DOWNLOAD", `${url} could not be fetched`, { url }, cause);
  }
  const { status } = response;
  if (!response.ok) throw new CedraError(status === 404 ? "NOT_FOUND" : "DOWNLOAD", `${url} was refused with status ${status}`, { url, status });
  return response.text();
}

const wanted = (name: string): boolean => name.endsWith(".json") || name.endsWith(".safetensors");

const isDirectory = (source: object): source is FileSystemDirectoryHandle => "kind" in source && source.kind === "directory";

function folderUrl(source: string | URL): string {
  try {
    const url = new URL(source, globalThis.document?.baseURI ?? globalThis.location?.href);
    if (!url.pathname.endsWith("/")) url.pathname += "/";
    return url.href;
  } catch (cause) {
    throw new CedraError("ARGUMENT", `\`${source}\` is not a URL`, { found: String(source) }, cause);
  }
}
