//! CPU twin of `group_rows`.
