//! Kernel `boundary` against its CPU twin.
