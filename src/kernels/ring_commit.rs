//! Kernel `ring_commit`.
