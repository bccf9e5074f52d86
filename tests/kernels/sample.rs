//! Kernel `sample` against its CPU twin.
