//! Any bytes give a message of the broker or a named error, each message has one encoding, and no list is longer than one packet can serve.
#![no_main]

use cuda_ipc_core::broker::message::{MAGIC, MESSAGE_MAX, VERSION};
use cuda_ipc_core::broker::{Answer, BATCH_MAX, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    // A head that is wrong in its first bytes ends the decoding: give it a right beginning.
    let mut bytes = bytes.to_vec();
    for (to, from) in bytes.iter_mut().zip(MAGIC.iter().chain(&[VERSION])) {
        *to = *from;
    }
    check(&bytes);
});

fn check(bytes: &[u8]) {
    let mut buffer = [0xee; MESSAGE_MAX];
    match Request::decode(bytes) {
        Ok(request) => {
            if let Request::Chunks(ids) = request {
                assert!((1..=BATCH_MAX).contains(&ids.len()) && ids.iter().all(|id| id.generation != 0), "{request:?}");
            }
            assert_eq!(request.encode(&mut buffer), bytes, "a second encoding of {request:?}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match Answer::decode(bytes) {
        Ok(answer) => {
            if let Answer::Chunks(outcomes) = answer {
                assert!((1..=BATCH_MAX).contains(&outcomes.len()), "{answer:?}");
            }
            assert_eq!(answer.encode(&mut buffer), bytes, "a second encoding of {answer:?}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
