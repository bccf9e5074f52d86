//! Kernel `route`.
