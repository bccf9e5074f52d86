//! CPU twin of `engram_gather`.
