export { Chat, ChatCompletions, type ChatOptions } from "./chat.js";
export type {
  ChatAssistantMessage, ChatCompletion, ChatCompletionChunk, ChatDelta, ChatFinish, ChatMessage, ChatRequest, ChatSystemMessage,
  ChatTextPart, ChatTool, ChatToolCall, ChatToolMessage, ChatUsage, ChatUserMessage,
} from "./completion.js";
export { Engine, idb, memory, type LoadOptions, type PlanOptions } from "./engine.js";
export { CedraError, type ErrorCode, type ErrorData } from "./errors.js";
export type { Attention, LayerAttention, Ngrams, PositionRange } from "./figures.js";
export type { BufferLimits, Counters, EngineInfo, Exceeded, Fit, LayerInfo, MemoryPlan } from "./info.js";
export type {
  DownloadProgress, Draft, DraftCounters, Finish, KernelReport, LayerRows, LoadProgress, ReadProgress, RecoveredSession, RecoverProgress, RereadProgress,
  SelfTestReport, SessionEntry, StoreRef, StoreUsage, UploadProgress, VerifyProgress,
} from "./protocol.js";
export { Answer, Session, type Appended, type AppendOptions, type GenerateOptions, type Piece, type SaveOptions, type Written } from "./session.js";
export type { ModelSource } from "./source.js";
export { isSupported, type AdapterName, type Support } from "./supported.js";
export type { WasmSource } from "./wasm.js";
