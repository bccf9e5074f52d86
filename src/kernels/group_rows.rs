//! Kernel `group_rows`.
