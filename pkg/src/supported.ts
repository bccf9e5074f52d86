import type { BufferLimits } from "./info.js";

/** What {@link isSupported} found. */
export interface Support {
  /** Whether an engine can run here. */
  supported: boolean;
  /** What is missing, in words, each with what was found. */
  missing: string[];
  /** What goes on without, at a price: caching, locks, a worker. */
  degraded: string[];
  /** The adapter, as far as it tells. */
  adapter?: AdapterName;
  /** Features of the adapter. */
  features: string[];
  /** Limits of the adapter that matter here. */
  limits: Record<string, number>;
}

/** What an adapter tells of itself. */
export interface AdapterName {
  /** Who made it. */
  vendor: string;
  /** Its family. */
  architecture: string;
  /** In words. */
  description: string;
}

/** Limits that every kernel keeps to. They are the defaults of WebGPU, so only an adapter below its own standard falls short. */
const NEEDED: Record<string, number> = {
  maxStorageBuffersPerShaderStage: 8,
  maxStorageBufferBindingSize: 128 << 20,
  maxBufferSize: 256 << 20,
  maxComputeWorkgroupStorageSize: 16 << 10,
  maxComputeInvocationsPerWorkgroup: 256,
  maxComputeWorkgroupSizeX: 256,
  maxComputeWorkgroupsPerDimension: 65535,
};

interface Adapter {
  readonly features: Iterable<string>;
  readonly limits: Record<string, number>;
  readonly info?: AdapterName;
}

/** Asks this browser for everything that an engine needs. Loads nothing and keeps no device. */
export async function isSupported(): Promise<Support> {
  const missing: string[] = [];
  const degraded: string[] = [];
  const found: Support = { supported: false, missing, degraded, features: [], limits: {} };
  if (typeof WebAssembly === "undefined") missing.push("WebAssembly");
  const { navigator } = globalThis;
  const gpu = webGpu();
  if (!gpu) missing.push(globalThis.isSecureContext === false ? "WebGPU: only pages over https and on localhost have it" : "WebGPU");
  const adapter = await gpu?.requestAdapter().catch(() => null);
  if (gpu && !adapter) missing.push("a WebGPU adapter: the browser offers none");
  if (adapter) {
    found.features = [...adapter.features].sort();
    for (const [name, needed] of Object.entries(NEEDED)) {
      const value = adapter.limits[name] ?? 0;
      found.limits[name] = value;
      if (value < needed) missing.push(`${name}: ${needed} needed, ${value} found`);
    }
    if (adapter.info) {
      const { vendor, architecture, description } = adapter.info;
      found.adapter = { vendor, architecture, description };
    }
  }
  if (typeof Worker === "undefined") degraded.push("workers: an engine runs in the page's thread only");
  if (!(await storageWorks())) degraded.push("IndexedDB: sessions last as long as the page");
  if (!navigator?.locks) degraded.push("Web Locks: two tabs may write the same session");
  found.supported = missing.length === 0;
  return found;
}

/** What of an adapter's limits decides whether a model fits; nothing without an adapter. */
export async function adapterLimits(): Promise<BufferLimits | undefined> {
  const adapter = await webGpu()?.requestAdapter().catch(() => null);
  const limits = adapter?.limits as Partial<BufferLimits> | undefined;
  const { maxBufferSize, maxStorageBufferBindingSize } = limits ?? {};
  return maxBufferSize === undefined || maxStorageBufferBindingSize === undefined ? undefined : { maxBufferSize, maxStorageBufferBindingSize };
}

const webGpu = (): { requestAdapter(): Promise<Adapter | null> } | undefined =>
  (globalThis.navigator as { gpu?: { requestAdapter(): Promise<Adapter | null> } } | undefined)?.gpu;

/** Private windows have an IndexedDB that cannot be opened. */
function storageWorks(): Promise<boolean> {
  return new Promise((answer) => {
    try {
      const request = indexedDB.open("cedra-probe");
      request.onerror = (): void => answer(false);
      request.onsuccess = (): void => {
        request.result.close();
        indexedDB.deleteDatabase("cedra-probe");
        answer(true);
      };
    } catch {
      answer(false);
    }
  });
}
