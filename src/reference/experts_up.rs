//! CPU twin of `experts_up`.
