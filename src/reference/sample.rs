//! CPU twin of `sample`.
