/** What can go wrong, as a stable name. The numbers belonging to it are in {@link CedraError.data}. */
export type ErrorCode =
  // of the engine
  | "IO"
  | "MALFORMED"
  | "CONFIG"
  | "TENSOR"
  | "TOKENIZER"
  | "TOKEN_ID"
  | "EMPTY_PROMPT"
  | "CONTEXT"
  | "SETTING"
  | "NON_FINITE"
  | "NO_GPU"
  | "DEVICE_LIMIT"
  | "DEVICE_LOST"
  | "DEVICE"
  | "FINGERPRINT"
  | "SESSION_DAMAGED"
  | "NO_SESSION"
  | "SESSION_EXISTS"
  | "SESSION_CLOSED"
  | "SESSION_BUSY"
  | "OTHER_ENGINE"
  | "ABORTED"
  | "STORE"
  | "UNSUPPORTED"
  // of the package
  | "ARGUMENT"
  | "NOT_FOUND"
  | "DOWNLOAD"
  | "QUOTA"
  | "ENGINE_CLOSED"
  | "WORKER"
  | "INTERNAL";

const CODES: ReadonlySet<string> = new Set<ErrorCode>([
  "IO", "MALFORMED", "CONFIG", "TENSOR", "TOKENIZER", "TOKEN_ID", "EMPTY_PROMPT", "CONTEXT", "SETTING", "NON_FINITE", "NO_GPU",
  "DEVICE_LIMIT", "DEVICE_LOST", "DEVICE", "FINGERPRINT", "SESSION_DAMAGED", "NO_SESSION", "SESSION_EXISTS", "SESSION_CLOSED",
  "SESSION_BUSY", "OTHER_ENGINE", "ABORTED", "STORE", "UNSUPPORTED", "ARGUMENT", "NOT_FOUND", "DOWNLOAD", "QUOTA",
  "ENGINE_CLOSED", "WORKER", "INTERNAL",
]);

/** Numbers and names that belong to an error. */
export type ErrorData = Readonly<Record<string, unknown>>;

/** The one error that this package throws. */
export class CedraError extends Error {
  /** Always this. */
  override readonly name = "CedraError";

  constructor(
    /** What went wrong. */
    readonly code: ErrorCode,
    message: string,
    /** The numbers in the message, to act on. */
    readonly data: ErrorData = {},
    /** What was thrown below. */
    cause?: unknown,
  ) {
    super(message, cause === undefined ? undefined : { cause });
  }
}

/** An error as it travels between threads: plain data, so that nothing gets lost on the way. */
export interface WireError {
  code: ErrorCode;
  message: string;
  data: ErrorData;
  stack?: string;
  cause?: { name: string; message: string; code?: string } | WireError;
}

const text = (thrown: unknown): string => (thrown instanceof Error ? thrown.message : String(thrown));

/** Whatever was thrown, as a {@link CedraError}. */
export function asCedraError(thrown: unknown): CedraError {
  if (thrown instanceof CedraError) return thrown;
  if (typeof thrown === "object" && thrown !== null) {
    const { code: word, data, cause, name } = thrown as { code?: unknown; data?: unknown; cause?: unknown; name?: unknown };
    const code = word === "STORE_FULL" ? "QUOTA" : word;
    if (typeof code === "string" && CODES.has(code)) {
      const error = new CedraError(code as ErrorCode, text(thrown), isRecord(data) ? data : {}, cause);
      if (thrown instanceof Error && thrown.stack) error.stack = thrown.stack;
      return error;
    }
    if (name === "AbortError") return new CedraError("ABORTED", "aborted", {}, thrown);
    if (name === "QuotaExceededError") return new CedraError("QUOTA", "the browser's storage is full", {}, thrown);
  }
  return new CedraError("INTERNAL", text(thrown), {}, thrown);
}

/** The error of a call whose signal was aborted. */
export const aborted = (signal?: AbortSignal): CedraError => new CedraError("ABORTED", "aborted", {}, signal?.reason);

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function toWire(thrown: unknown): WireError {
  const error = asCedraError(thrown);
  const wire: WireError = { code: error.code, message: error.message, data: plain(error.data) };
  if (error.stack) wire.stack = error.stack;
  const { cause } = error;
  if (cause instanceof CedraError) wire.cause = toWire(cause);
  else if (cause instanceof Error) wire.cause = { name: cause.name, message: cause.message };
  else if (cause !== undefined) wire.cause = { name: typeof cause, message: String(cause) };
  return wire;
}

export function fromWire(wire: WireError): CedraError {
  let cause: unknown;
  if (wire.cause) {
    if ("data" in wire.cause) cause = fromWire(wire.cause);
    else {
      cause = new Error(wire.cause.message);
      (cause as Error).name = wire.cause.name;
    }
  }
  const error = new CedraError(wire.code, wire.message, wire.data, cause);
  if (wire.stack) error.stack = wire.stack;
  return error;
}

/** Data that can be cloned: what cannot is written out. */
function plain(data: ErrorData): ErrorData {
  const entries = Object.entries(data).map(([key, value]): [string, unknown] => {
    try {
      return [key, structuredClone(value)];
    } catch {
      return [key, String(value)];
    }
  });
  return Object.fromEntries(entries);
}
