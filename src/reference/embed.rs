//! CPU twin of `embed`.
