//! Key v1: golden bytes, totality of the decoder, one key for one reservation.
#![cfg(not(loom))]

mod support;

use cuda_ipc_core::key::{HostId, KEY_LEN, Key, KeyError, KeyKind, Nonce};
use proptest::prelude::*;
use support::{crc32c, hex, poison_stack, reseal};

const RESERVATION: Key = Key {
    kind: KeyKind::Reservation,
    pid: 4242,
    table_fd: 7,
    nonce: Nonce(0x1122_3344_5566_7788),
    pid_namespace: 0xf000_0039,
    host: HostId(0x99aa_bbcc_ddee_ff01),
    base: 0x7f12_0000_0000,
    len: 0x180_0000_0000,
};

const POOL_ALLOCATION: Key = Key {
    kind: KeyKind::PoolAllocation { slot: 0xfedc_ba98 },
    pid: 0x7fff_ffff,
    table_fd: 0x7fff_ffff,
    nonce: Nonce(1),
    pid_namespace: 1,
    host: HostId(0),
    base: 0x3_0200_0400,
    len: 0x1200,
};

const POOL: Key = Key { kind: KeyKind::Pool, base: 0x55d0_c0ff_ee10, len: 1, ..RESERVATION };

fn golden() -> [(Key, Vec<u8>); 3] {
    [
        (RESERVATION, hex(include_str!("golden/key_reservation.hex"))),
        (POOL_ALLOCATION, hex(include_str!("golden/key_pool_allocation.hex"))),
        (POOL, hex(include_str!("golden/key_pool.hex"))),
    ]
}

#[test]
fn golden_bytes() {
    for (key, bytes) in golden() {
        assert_eq!(bytes.len(), KEY_LEN);
        assert_eq!(key.encode().as_slice(), bytes);
        assert_eq!(Key::decode(&bytes), Ok(key));
        assert_eq!(crc32c(&bytes[..60]).to_le_bytes(), bytes[60..], "the golden file's own checksum");
    }
    // The check value that every catalogue of CRCs prints for CRC-32C.
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
}

#[test]
fn host_id_is_fnv_1a() {
    // Computed by another implementation in another language.
    assert_eq!(HostId::from_boot_id(*b"0123456789abcdef"), HostId(0x2e37_3913_e5ad_677d));
    assert_ne!(HostId::from_boot_id([0; 16]), HostId::from_boot_id([1; 16]));
}

#[test]
fn every_single_bit_flip_is_rejected() {
    for (_, bytes) in golden() {
        for bit in 0..KEY_LEN * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let error = Key::decode(&flipped).expect_err("a flipped bit");
            match bit / 8 {
                0..4 => assert!(matches!(error, KeyError::Magic(_)), "{error:?}"),
                4 => assert!(matches!(error, KeyError::Version(_)), "{error:?}"),
                _ => assert!(matches!(error, KeyError::Checksum { .. }), "{error:?}"),
            }
        }
    }
}

/// Bytes to put at an offset of a golden key, under a right checksum, and what that is called.
#[test]
fn each_wrong_field_has_its_name() {
    let range = |base, len| KeyError::Range { base, len };
    let all = u64::MAX.to_le_bytes();
    let wrong: [(usize, &[u8], KeyError); 15] = [
        (0, b"CIPK", KeyError::Magic(*b"CIPK")),
        (4, &[0], KeyError::Version(0)),
        (4, &[2], KeyError::Version(2)),
        (5, &[0], KeyError::Kind(0)),
        (5, &[4], KeyError::Kind(4)),
        (6, &[0, 0x80], KeyError::Flags(0x8000)),
        (8, &[0; 4], KeyError::Pid(0)),
        (8, &[0, 0, 0, 0x80], KeyError::Pid(0x8000_0000)),
        (12, &[0xff; 4], KeyError::TableFd(u32::MAX)),
        (16, &[0; 8], KeyError::Nonce),
        (44, &[0; 8], range(RESERVATION.base, 0)),
        (44, &all, range(RESERVATION.base, u64::MAX)),
        (36, &all, range(u64::MAX, RESERVATION.len)),
        (52, &[1], KeyError::Detail(1)),
        (59, &[0x80], KeyError::Detail(1 << 63)),
    ];
    for (offset, field, error) in wrong {
        let mut bytes = RESERVATION.encode();
        bytes[offset..offset + field.len()].copy_from_slice(field);
        reseal(&mut bytes);
        assert_eq!(Key::decode(&bytes), Err(error), "offset {offset}");
    }
    let mut bytes = POOL_ALLOCATION.encode();
    bytes[56] = 1;
    reseal(&mut bytes);
    assert_eq!(Key::decode(&bytes), Err(KeyError::Detail(0x1_fedc_ba98)), "a slot has 32 bits");
    for (offset, field, error) in [(44, 2, range(POOL.base, 2)), (52, 1, KeyError::Detail(1))] {
        let mut bytes = POOL.encode();
        bytes[offset] = field;
        reseal(&mut bytes);
        assert_eq!(Key::decode(&bytes), Err(error), "a pool names no memory, offset {offset}");
    }
}

#[test]
fn the_last_byte_of_the_address_space_can_be_named() {
    let mut key = Key { base: u64::MAX - 1, len: 1, ..RESERVATION };
    assert_eq!(Key::decode(&key.encode()), Ok(key));
    key.len = 2;
    assert_eq!(Key::decode(&key.encode()), Err(KeyError::Range { base: u64::MAX - 1, len: 2 }));
}

#[test]
fn any_alignment_and_exactly_64_bytes() {
    for shift in 0..16 {
        let mut carrier = [0xa5; 96];
        carrier[shift..shift + KEY_LEN].copy_from_slice(&RESERVATION.encode());
        assert_eq!(Key::decode(&carrier[shift..shift + KEY_LEN]), Ok(RESERVATION));
        assert_eq!(Key::decode(&carrier[shift..shift + KEY_LEN + 1]), Err(KeyError::Length(65)));
        assert_eq!(Key::decode(&carrier[shift..shift + KEY_LEN - 1]), Err(KeyError::Length(63)));
    }
}

fn any_key() -> impl Strategy<Value = Key> {
    let kind = prop_oneof![Just(KeyKind::Reservation), Just(KeyKind::Pool), any::<u32>().prop_map(|slot| KeyKind::PoolAllocation { slot })];
    let ids = (1..=0x7fff_ffff_u32, 0..=0x7fff_ffff_u32, 1..=u64::MAX, any::<u32>(), any::<u64>());
    let range = any::<u64>().prop_flat_map(|base| (Just(base.min(u64::MAX - 1)), 1..=u64::MAX - base.min(u64::MAX - 1)));
    (kind, ids, range).prop_map(|(kind, (pid, table_fd, nonce, pid_namespace, host), (base, len))| Key {
        kind,
        pid,
        table_fd,
        nonce: Nonce(nonce),
        pid_namespace,
        host: HostId(host),
        base,
        len: if kind == KeyKind::Pool { 1 } else { len },
    })
}

/// Addresses near the borders of `key` and anywhere.
fn probe(key: Key) -> impl Strategy<Value = (Key, u64, u64)> {
    let borders = [0, key.base, key.base.wrapping_add(key.len), u64::MAX];
    let near = (proptest::sample::select(borders.to_vec()), -3_i64..=3).prop_map(|(at, by)| at.wrapping_add_signed(by));
    let lens = [0, 1, key.len, u64::MAX - key.base];
    let len = (proptest::sample::select(lens.to_vec()), -3_i64..=3).prop_map(|(len, by)| len.wrapping_add_signed(by));
    (Just(key), prop_oneof![near, any::<u64>()], prop_oneof![len, any::<u64>()])
}

fn covers_by_wide_arithmetic(key: &Key, base: u64, len: u64) -> bool {
    let end = u128::from(base) + u128::from(len);
    let key_end = u128::from(key.base) + u128::from(key.len);
    u128::from(base) >= u128::from(key.base) && end <= key_end && end <= u128::from(u64::MAX)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn round_trip(key in any_key()) {
        let bytes = key.encode();
        prop_assert_eq!(Key::decode(&bytes), Ok(key));
        prop_assert_eq!(crc32c(&bytes[..60]).to_le_bytes(), <[u8; 4]>::try_from(&bytes[60..]).expect("four bytes"));
    }

    /// Users compare keys byte for byte, so whatever lay on the stack must not show (bug case A3).
    #[test]
    fn same_reservation_same_bytes(key in any_key(), pattern in any::<u8>()) {
        poison_stack(pattern);
        let first = key.encode();
        poison_stack(!pattern);
        prop_assert_eq!(key.encode(), first);
        prop_assert_eq!(Key::decode(&first).expect("own key").encode(), first);
    }

    #[test]
    fn any_bytes_decode_or_have_a_name(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        match Key::decode(&bytes) {
            Ok(key) => prop_assert_eq!(key.encode().to_vec(), bytes),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    /// With a right checksum the fields are reached: what decodes is canonical, what does not is named.
    #[test]
    fn damaged_fields_under_a_right_checksum(key in any_key(), changes in proptest::collection::vec((4..60_usize, any::<u8>()), 1..6)) {
        let mut bytes = key.encode();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        reseal(&mut bytes);
        match Key::decode(&bytes) {
            Ok(key) => prop_assert_eq!(key.encode(), bytes),
            Err(error) => prop_assert!(!matches!(error, KeyError::Checksum { .. } | KeyError::Length(_) | KeyError::Magic(_)), "{error:?}"),
        }
    }

    #[test]
    fn covers_is_containment((key, base, len) in any_key().prop_flat_map(probe)) {
        prop_assert_eq!(key.covers(base, len), covers_by_wide_arithmetic(&key, base, len));
    }

    /// A key that was made up and never decoded may wrap around; the answer is still the wide one.
    #[test]
    fn covers_never_panics(base in any::<u64>(), len in any::<u64>(), at in any::<u64>(), by in any::<u64>()) {
        let key = Key { base, len, ..RESERVATION };
        prop_assert_eq!(key.covers(at, by), covers_by_wide_arithmetic(&key, at, by));
    }
}
