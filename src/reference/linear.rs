//! CPU twin of `linear`.
