//! Kernel `linear`.
