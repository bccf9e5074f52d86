//! Kernel `route` against its CPU twin.
