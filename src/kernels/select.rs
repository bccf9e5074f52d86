//! Kernel `select`.
