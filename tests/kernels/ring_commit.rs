//! Kernel `ring_commit` against its CPU twin.
