// What an engine tells of itself.

/** Bytes on the device, by kind, of a model with one session. */
export interface MemoryPlan {
  /** Weights. */
  weights: number;
  /** A session's caches without its pages. */
  cache: number;
  /** Pages for a whole context; they come a slab at a time. */
  pages: number;
  /** A slab of pages. */
  slab: number;
  /** Activations. */
  scratch: number;
  /** Parameters of the kernels. */
  params: number;
  /** Where results come back. */
  readback: number;
  /** All of it, without `slab`, which is part of `pages`. */
  total: number;
}

/** A buffer that is larger than a device allows. */
export interface Exceeded {
  /** The buffer. */
  what: string;
  /** Bytes that it needs. */
  needed: number;
  /** Bytes that the device allows. */
  allowed: number;
}

/** A plan, held against the adapter that is there. */
export interface Fit extends MemoryPlan {
  /**
   * Whether the adapter's limits allow every buffer; `undefined` without an adapter. How much memory there is in all, no
   * adapter tells.
   */
  fits: boolean | undefined;
  /** The first buffer that they do not allow. */
  exceeded?: Exceeded;
}

/** The largest buffers of an adapter. */
export interface BufferLimits {
  /** Bytes of a buffer at most. */
  readonly maxBufferSize: number;
  /** Bytes of a buffer that a kernel sees at most. */
  readonly maxStorageBufferBindingSize: number;
}

/** A layer of the model. */
export interface LayerInfo {
  /** Its number, from 0. */
  index: number;
  /** What it attends to besides its window: nothing, entries that it adds and chooses, entries that it chooses, a choice made before. */
  role: "window" | "full" | "reindex" | "reuse";
  /** Tokens an entry. */
  ratio: number;
  /** Which half of the model it is in. */
  part: "encoder" | "decoder";
  /** Whether it has n-gram memory. */
  engram: boolean;
}

/** The adapter, what of it is used, the model and its layers. */
export interface EngineInfo {
  /** The adapter. */
  adapter: {
    /** Its name. */
    name: string;
    /** Whether it is the CPU. */
    software: boolean;
    /** All of it in a line. */
    description: string;
  };
  /** What of the adapter is used. Results are the same without. */
  features: {
    /** Half floats: no kernel has a use for them. */
    f16: boolean;
    /** Subgroup operations, where the device's lanes are as kernels need them. */
    subgroups: boolean;
    /** Packed integer dot products. */
    dot4: boolean;
    /** Times on the device. */
    timestamps: boolean;
  };
  /** Limits of the device. */
  limits: BufferLimits & {
    /** Bytes of a workgroup's memory. */
    maxComputeWorkgroupStorageSize: number;
    /** Threads of a workgroup. */
    maxComputeInvocationsPerWorkgroup: number;
    /** Buffers that a kernel sees. */
    maxStorageBuffersPerShaderStage: number;
  };
  /** The model's sizes. */
  model: {
    /** Tokens that there are. */
    vocabulary: number;
    /** Width of a residual stream. */
    hidden: number;
    /** Attention heads. */
    heads: number;
    /** Width of a head. */
    headDim: number;
    /** Routed experts of a layer. */
    experts: number;
    /** Experts that a token is sent to. */
    expertsPerToken: number;
    /** Tokens of a window. */
    window: number;
    /** Tokens that the model can address. */
    maxContext: number;
    /** The decoder's first layer. */
    decoder: number;
    /** The token that begins a text. */
    bos: number;
    /** The token that ends one. */
    eos: number;
    /** What its saved sessions carry. */
    fingerprint: {
      /** Of the config. */
      config: string;
      /** Of the weights. */
      weights: string;
      /** Of the tokenizer. */
      tokenizer: string;
    };
  };
  /** Tokens that a session holds. */
  context: number;
  /** Rows that are computed at a time. */
  chunk: number;
  /** Memory that was planned, and is used with one session. */
  memory: MemoryPlan;
  /** The layers, in their order. */
  layers: LayerInfo[];
}

/** What a device has done since it was made, and what it holds. */
export interface Counters {
  /** Submissions. */
  submissions: number;
  /** Dispatches. */
  dispatches: number;
  /** Dispatches, by kernel. */
  dispatchesByKernel: Record<string, number>;
  /** Readbacks that were waited for at once. */
  blockingReadbacks: number;
  /** Readbacks. */
  readbacks: number;
  /** Times that the device was waited for. */
  waits: number;
  /** Bytes of weights that kernels have read. */
  weightBytes: number;
  /** Bytes of caches that kernels have read. */
  cacheBytes: number;
  /** Buffers that there are. */
  buffers: number;
  /** Bytes that are allocated, by kind. */
  allocated: {
    /** Weights. */
    weights: number;
    /** Caches and pages. */
    cache: number;
    /** Activations. */
    scratch: number;
    /** Parameters. */
    params: number;
    /** Where results come back. */
    readback: number;
  };
}
