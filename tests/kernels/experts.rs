//! Kernel `experts` against its CPU twin.
