//! Kernel `cache_append` against its CPU twin.
