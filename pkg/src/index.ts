export { Engine, idb, memory, type LoadOptions } from "./engine.js";
export { CedraError, type ErrorCode, type ErrorData } from "./errors.js";
export type {
  Finish,
  KernelReport,
  LayerRows,
  LoadProgress,
  ReadProgress,
  RecoveredSession,
  RecoverProgress,
  SelfTestReport,
  SessionEntry,
  StoreRef,
  StoreUsage,
} from "./protocol.js";
export { Answer, Session, type AppendOptions, type GenerateOptions, type Piece, type SaveOptions } from "./session.js";
export type { ModelSource } from "./source.js";
export { isSupported, type Support } from "./supported.js";
export type { WasmSource } from "./wasm.js";
