//! CPU twin of `engram_gate`.
