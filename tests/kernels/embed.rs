//! Kernel `embed` against its CPU twin.
