//! Kernel `engram_gather` against its CPU twin.
