//! CPU twin of `route`.
