//! CPU twin of `cache_append`.
