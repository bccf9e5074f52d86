//! Kernel `engram_gather`.
