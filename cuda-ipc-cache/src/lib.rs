//! cache.
