//! CPU twin of `select`.
