//! Kernel `embed`.
