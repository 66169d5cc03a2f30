//! pidfd.
