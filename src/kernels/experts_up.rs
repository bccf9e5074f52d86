//! Kernel `experts_up`.
