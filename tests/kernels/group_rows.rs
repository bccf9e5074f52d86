//! Kernel `group_rows` against its CPU twin.
