// The wasm's WebGPU layer knows no subgroups in a browser: it neither sees that an adapter has them nor asks for them. So they
// are asked for here, and only for the device of an engine. Whether they are good for anything, the engine tries by itself.

interface Adapter {
  readonly features: { has(name: string): boolean };
  requestDevice(descriptor?: Descriptor): Promise<unknown>;
}

interface Descriptor {
  label?: string;
  requiredFeatures?: Iterable<string>;
}

interface Gpu {
  requestAdapter(options?: unknown): Promise<Adapter | null>;
}

/** The label of an engine's device. */
const LABEL = "cedra";
const FEATURE = "subgroups";

/** Puts a method of its own before one that an object inherits; not every WebGPU lets its classes be changed. */
function put<T extends object, K extends keyof T>(object: T, name: K, value: T[K]): void {
  Object.defineProperty(object, name, { value, configurable: true, writable: true });
}

/** From now on an engine's device has subgroups where the adapter has them. To be called once a thread. */
export function askForSubgroups(): void {
  const gpu = (globalThis as { navigator?: { gpu?: Gpu } }).navigator?.gpu;
  if (!gpu) return;
  const requestAdapter = gpu.requestAdapter;
  put(gpu, "requestAdapter", async (options) => {
    const adapter = await requestAdapter.call(gpu, options);
    if (adapter?.features.has(FEATURE)) {
      const requestDevice = adapter.requestDevice;
      put(adapter, "requestDevice", (descriptor) => {
        if (descriptor?.label !== LABEL) return requestDevice.call(adapter, descriptor);
        return requestDevice.call(adapter, { ...descriptor, requiredFeatures: [...(descriptor.requiredFeatures ?? []), FEATURE] });
      });
    }
    return adapter;
  });
}
