//! Kernel `engram_gate` against its CPU twin.
