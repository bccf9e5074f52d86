//! Kernel `index_score`.
