//! CPU twin of `experts_down`.
