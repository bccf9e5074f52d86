//! CPU twin of `ring_commit`.
