//! Kernel `engram_gate`.
