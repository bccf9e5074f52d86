//! CPU twin of `attend`.
