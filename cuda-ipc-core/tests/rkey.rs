//! The API's rkey: golden bytes for each payload, totality of the decoder, no range outside its key.
#![cfg(not(loom))]

mod support;

use cuda_ipc_core::key::{Key, KeyError, KeyKind};
use cuda_ipc_core::rkey::{Payload, RKEY_LEN, Rkey, RkeyError};
use proptest::prelude::*;
use support::{crc32c, hex, poison_stack, reseal};

const UUID: [u8; 16] = [0xa0, 0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf];

fn key() -> Key {
    Key::decode(&hex(include_str!("golden/key_reservation.hex"))).expect("golden key")
}

fn posix() -> Rkey {
    Rkey { payload: Payload::Posix(key()), base: 0x7f12_0020_0000, len: 0x40_0000, device: UUID }
}

fn golden() -> [(Rkey, Vec<u8>); 3] {
    let handle = core::array::from_fn(|at| u8::try_from(at + 1).expect("at most 64"));
    let legacy = Rkey { payload: Payload::Legacy(handle), base: 0x3_0200_0000, len: 0x1234, device: UUID };
    let no_ipc = Rkey { payload: Payload::NoIpc, base: 0x1000, len: 1, device: [0; 16] };
    [
        (posix(), hex(include_str!("golden/rkey_posix.hex"))),
        (legacy, hex(include_str!("golden/rkey_legacy.hex"))),
        (no_ipc, hex(include_str!("golden/rkey_no_ipc.hex"))),
    ]
}

#[test]
fn golden_bytes() {
    for (rkey, bytes) in golden() {
        assert_eq!(bytes.len(), RKEY_LEN);
        assert_eq!(rkey.encode().as_slice(), bytes);
        assert_eq!(Rkey::decode(&bytes), Ok(rkey));
        assert_eq!(crc32c(&bytes[..104]).to_le_bytes(), bytes[104..], "the golden file's own checksum");
    }
    assert_eq!(golden()[0].1[40..104], key().encode(), "the payload is the key, unchanged");
}

#[test]
fn every_single_bit_flip_is_rejected() {
    for (_, bytes) in golden() {
        for bit in 0..RKEY_LEN * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let error = Rkey::decode(&flipped).expect_err("a flipped bit");
            match bit / 8 {
                0..4 => assert!(matches!(error, RkeyError::Magic(_)), "{error:?}"),
                4 => assert!(matches!(error, RkeyError::Version(_)), "{error:?}"),
                _ => assert!(matches!(error, RkeyError::Checksum { .. }), "{error:?}"),
            }
        }
    }
}

#[test]
fn each_wrong_field_has_its_name() {
    let size = |handle_type, size| RkeyError::PayloadSize { handle_type, size };
    let wrong: [(usize, &[u8], RkeyError); 13] = [
        (0, b"CIPC", RkeyError::Magic(*b"CIPC")),
        (4, &[2], RkeyError::Version(2)),
        (5, &[3], RkeyError::HandleType(3)),
        (5, &[0xff], RkeyError::HandleType(0xff)),
        (5, &[0], size(0, 64)),
        (6, &[63], size(2, 63)),
        (7, &[1], size(2, 0x140)),
        (16, &[0; 8], RkeyError::Range { base: 0x7f12_0020_0000, len: 0 }),
        (8, &[0xff; 8], RkeyError::Range { base: u64::MAX, len: 0x40_0000 }),
        (40, &[0], RkeyError::Key(KeyError::Magic([0, b'I', b'P', b'C']))),
        (40, b"c", RkeyError::Key(KeyError::Magic(*b"cIPC"))),
        // The reservation begins 2 MiB before the range.
        (8, &(key().base - 1).to_le_bytes(), RkeyError::OutsideReservation { base: key().base - 1, len: 0x40_0000 }),
        (16, &key().len.to_le_bytes(), RkeyError::OutsideReservation { base: 0x7f12_0020_0000, len: key().len }),
    ];
    for (offset, field, error) in wrong {
        let mut bytes = posix().encode();
        bytes[offset..offset + field.len()].copy_from_slice(field);
        reseal(&mut bytes);
        assert_eq!(Rkey::decode(&bytes), Err(error), "offset {offset}");
    }
}

#[test]
fn no_handle_means_no_payload_bytes() {
    for at in 40..104 {
        let mut bytes = Rkey { payload: Payload::NoIpc, ..posix() }.encode();
        bytes[at] = 1;
        reseal(&mut bytes);
        assert_eq!(Rkey::decode(&bytes), Err(RkeyError::Padding), "offset {at}");
    }
}

/// The type decides how the payload is read, never the bytes themselves (bug cases B17, B18).
#[test]
fn a_legacy_handle_that_looks_like_a_key_stays_a_legacy_handle() {
    let disguised = Rkey { payload: Payload::Legacy(key().encode()), ..posix() };
    assert_eq!(Rkey::decode(&disguised.encode()), Ok(disguised));
}

#[test]
fn any_alignment_and_exactly_108_bytes() {
    for shift in 0..8 {
        let mut carrier = [0x5a; 120];
        carrier[shift..shift + RKEY_LEN].copy_from_slice(&posix().encode());
        assert_eq!(Rkey::decode(&carrier[shift..shift + RKEY_LEN]), Ok(posix()));
        assert_eq!(Rkey::decode(&carrier[shift..shift + RKEY_LEN + 1]), Err(RkeyError::Length(109)));
        assert_eq!(Rkey::decode(&carrier[shift..shift + RKEY_LEN - 1]), Err(RkeyError::Length(107)));
    }
}

fn any_rkey() -> impl Strategy<Value = Rkey> {
    let payload = prop_oneof![
        Just(Payload::NoIpc),
        proptest::array::uniform32(any::<u16>()).prop_map(|words| {
            let mut handle = [0; 64];
            handle.chunks_exact_mut(2).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
            Payload::Legacy(handle)
        }),
        any::<Option<u32>>().prop_map(|slot| {
            let kind = slot.map_or(KeyKind::Reservation, |slot| KeyKind::PoolAllocation { slot });
            Payload::Posix(Key { kind, ..key() })
        }),
    ];
    (payload, 0..key().len, any::<u64>(), any::<u128>()).prop_map(|(payload, offset, len, device)| Rkey {
        payload,
        base: key().base + offset,
        len: 1 + len % (key().len - offset),
        device: device.to_le_bytes(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn round_trip_with_the_same_bytes_each_time(rkey in any_rkey(), pattern in any::<u8>()) {
        poison_stack(pattern);
        let bytes = rkey.encode();
        poison_stack(!pattern);
        prop_assert_eq!(rkey.encode(), bytes);
        prop_assert_eq!(Rkey::decode(&bytes), Ok(rkey));
        prop_assert_eq!(crc32c(&bytes[..104]).to_le_bytes(), <[u8; 4]>::try_from(&bytes[104..]).expect("four bytes"));
    }

    #[test]
    fn any_bytes_decode_or_have_a_name(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        match Rkey::decode(&bytes) {
            Ok(rkey) => prop_assert_eq!(rkey.encode().to_vec(), bytes),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    /// Both checksums are made right, so that every field check is reached; what is accepted is canonical and lies inside its key.
    #[test]
    fn damaged_fields_under_right_checksums(rkey in any_rkey(), changes in proptest::collection::vec((5..104_usize, any::<u8>()), 1..6)) {
        let mut bytes = rkey.encode();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        if let Payload::Posix(_) = rkey.payload {
            reseal(&mut bytes[40..104]);
        }
        reseal(&mut bytes);
        match Rkey::decode(&bytes) {
            Ok(decoded) => {
                prop_assert_eq!(decoded.encode(), bytes);
                if let Payload::Posix(key) = decoded.payload {
                    let end = u128::from(decoded.base) + u128::from(decoded.len);
                    prop_assert!(decoded.base >= key.base && end <= u128::from(key.base) + u128::from(key.len));
                }
            }
            Err(error) => prop_assert!(!matches!(error, RkeyError::Checksum { .. } | RkeyError::Length(_)), "{error:?}"),
        }
    }
}
