//! Kernel `sample`.
