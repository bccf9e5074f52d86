//! CPU twin of `boundary`.
