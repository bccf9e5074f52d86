//! Kernel `boundary`.
