//! Kernel `cache_append`.
