//! Kernel `linear` against its CPU twin.
