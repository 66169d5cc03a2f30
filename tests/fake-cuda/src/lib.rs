//! fake.
