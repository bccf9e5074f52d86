//! Kernel `experts_down`.
