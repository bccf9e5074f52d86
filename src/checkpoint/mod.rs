//! Where weights come from.
