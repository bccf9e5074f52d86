//! Kernel `index_score` against its CPU twin.
