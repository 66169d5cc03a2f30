//! Any bytes give a key or a named error, and a key has one encoding.
#![no_main]

#[path = "../crc32c.rs"]
mod crc32c;

use cuda_ipc_core::key::{KEY_LEN, Key};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    // Random bytes do not get past the checksum: give the decoder what its own encoder would have signed.
    if let Some(bytes) = bytes.first_chunk::<KEY_LEN>() {
        check(&signed(*bytes));
    }
});

fn check(bytes: &[u8]) {
    match Key::decode(bytes) {
        Ok(key) => {
            assert_eq!(key.encode(), bytes, "a second encoding of {key:?}");
            assert!(key.len > 0 && key.base.checked_add(key.len).is_some(), "{key:?}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// The same bytes with magic, version and checksum as they must be.
fn signed(mut bytes: [u8; KEY_LEN]) -> [u8; KEY_LEN] {
    bytes[..5].copy_from_slice(b"CIPC\x01");
    crc32c::sign(&mut bytes);
    bytes
}
