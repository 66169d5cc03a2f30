//! Any bytes give an rkey or a named error, an rkey has one encoding, and its range lies in what its key names.
#![no_main]

#[path = "../crc32c.rs"]
mod crc32c;

use cuda_ipc_core::rkey::{Payload, RKEY_LEN, Rkey};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(bytes) = bytes.first_chunk::<RKEY_LEN>() {
        let mut bytes = *bytes;
        bytes[..5].copy_from_slice(b"CIRK\x01");
        crc32c::sign(&mut bytes);
        check(&bytes);
        // And with a payload that is a key, as far as magic, version and checksum go.
        bytes[40..45].copy_from_slice(b"CIPC\x01");
        crc32c::sign(&mut bytes[40..104]);
        crc32c::sign(&mut bytes);
        check(&bytes);
    }
});

fn check(bytes: &[u8]) {
    match Rkey::decode(bytes) {
        Ok(rkey) => {
            assert_eq!(rkey.encode(), bytes, "a second encoding of {rkey:?}");
            let end = rkey.base.checked_add(rkey.len).expect("a range that does not wrap");
            assert!(rkey.len > 0);
            if let Payload::Posix(key) = rkey.payload {
                assert!(key.base <= rkey.base && end <= key.base + key.len, "{rkey:?} leaves its reservation");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
