//! Kernel `attend` against its CPU twin.
