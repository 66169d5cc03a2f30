//! CRC-32C for the targets: random bytes do not get past a checksum, so they sign their input as an encoder would.

/// CRC-32C bit by bit, written anew: it also checks the decoder's.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())))
}

/// Writes the checksum of what comes before over the last four bytes.
pub(crate) fn sign(bytes: &mut [u8]) {
    let (covered, checksum) = bytes.split_at_mut(bytes.len() - 4);
    checksum.copy_from_slice(&crc32c(covered).to_le_bytes());
}
