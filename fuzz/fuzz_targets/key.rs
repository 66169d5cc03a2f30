//! Any bytes give a key or a named error, and a key has one encoding.
#![no_main]

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
    let crc = crc32c(&bytes[..60]);
    bytes[60..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// CRC-32C bit by bit, written anew: it also checks the decoder's.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())))
}
