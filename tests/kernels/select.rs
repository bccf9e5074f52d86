//! Kernel `select` against its CPU twin.
