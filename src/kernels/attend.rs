//! Kernel `attend`.
