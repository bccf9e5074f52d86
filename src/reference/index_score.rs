//! CPU twin of `index_score`.
