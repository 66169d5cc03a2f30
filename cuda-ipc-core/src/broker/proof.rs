//! Names and proofs: what the two sides make of the nonce that a key has told the importer.
//!
//! Names of abstract sockets can be read by every process of a machine, so a name must not give the nonce away, and whoever merely reads a name must not pass
//! for an exporter or an importer. Each side proves that it knows the nonce by an HMAC over two fresh challenges; neither ever sends the nonce.

use core::fmt;

use hmac_sha256::{HMAC, Hash};

use crate::key::{HostId, Nonce};

/// Random bytes of one side, new for each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge(pub [u8; 16]);

/// Proof that a side knows the nonce.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Proof(pub [u8; 32]);

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Proof(..)")
    }
}

const NAME_LABEL: &[u8] = b"cuda-ipc broker name v1\0";
const EXPORTER_LABEL: &[u8] = b"cuda-ipc broker exporter v1\0";
const IMPORTER_LABEL: &[u8] = b"cuda-ipc broker importer v1\0";

/// The two proofs of one connection.
///
/// They have labels of their own, so that one side's proof sent back to it is worth nothing.
#[derive(Clone, Copy, Debug)]
pub struct Proofs {
    nonce: Nonce,
    importer: Challenge,
    exporter: Challenge,
}

impl Proofs {
    /// Of a connection in which the two sides sent these challenges.
    pub const fn new(nonce: Nonce, importer: Challenge, exporter: Challenge) -> Self {
        Self { nonce, importer, exporter }
    }

    /// What the exporter sends.
    pub fn of_exporter(&self) -> Proof {
        Proof(self.hmac(EXPORTER_LABEL).finalize())
    }

    /// What the importer sends.
    pub fn of_importer(&self) -> Proof {
        Proof(self.hmac(IMPORTER_LABEL).finalize())
    }

    /// Whether this is the exporter's; takes the same time for every wrong one.
    pub fn is_of_exporter(&self, proof: &Proof) -> bool {
        self.hmac(EXPORTER_LABEL).finalize_verify(&proof.0)
    }

    /// Whether this is the importer's; takes the same time for every wrong one.
    pub fn is_of_importer(&self, proof: &Proof) -> bool {
        self.hmac(IMPORTER_LABEL).finalize_verify(&proof.0)
    }

    fn hmac(&self, label: &[u8]) -> HMAC {
        let mut hmac = HMAC::new(self.nonce.0.to_le_bytes());
        hmac.update(label);
        hmac.update(self.importer.0);
        hmac.update(self.exporter.0);
        hmac
    }
}

/// The name of an exporter's socket: `cuda-ipc-` and 32 hexadecimal digits of a hash of its nonce.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SocketName {
    text: [u8; Self::FILE_LEN],
}

impl SocketName {
    const PREFIX: &[u8; 9] = b"cuda-ipc-";
    const ABSTRACT_LEN: usize = Self::PREFIX.len() + 32;
    const FILE_LEN: usize = Self::ABSTRACT_LEN + 1 + 16;

    /// The name of the exporter whose table has this nonce, on this machine.
    pub fn new(nonce: Nonce, host: HostId) -> Self {
        let mut hash = Hash::new();
        hash.update(NAME_LABEL);
        hash.update(nonce.0.to_le_bytes());
        let hash = hash.finalize();
        let digits = hash.iter().take(16).copied().chain(host.0.to_be_bytes()).flat_map(|byte| [byte >> 4, byte & 15]);
        let mut digits = digits.map(|digit| if digit < 10 { b'0' + digit } else { b'a' + digit - 10 });
        let mut text = [b'-'; Self::FILE_LEN];
        for (at, place) in text.iter_mut().enumerate() {
            match Self::PREFIX.get(at) {
                Some(&letter) => *place = letter,
                None if at == Self::ABSTRACT_LEN => {}
                None => *place = digits.next().unwrap_or(b'0'),
            }
        }
        Self { text }
    }

    /// The abstract name, without the zero byte in front.
    pub fn abstract_name(&self) -> &str {
        let (name, _) = self.text.split_at(Self::ABSTRACT_LEN);
        core::str::from_utf8(name).unwrap_or_default()
    }

    /// The name of the file in a socket directory: it ends with the machine, so that a directory that several machines share keeps them apart.
    pub fn file_name(&self) -> &str {
        core::str::from_utf8(&self.text).unwrap_or_default()
    }

    /// Whether `name` could be the file of some exporter of this machine.
    pub fn is_file_of(name: &str, host: HostId) -> bool {
        let name = name.as_bytes();
        let like = Self::new(Nonce(0), host);
        let (_, machine) = like.text.split_at(Self::ABSTRACT_LEN);
        let is_digit = |letter: &u8| matches!(letter, b'0'..=b'9' | b'a'..=b'f');
        name.len() == Self::FILE_LEN
            && name.starts_with(Self::PREFIX)
            && name.ends_with(machine)
            && name.iter().skip(Self::PREFIX.len()).take(32).all(is_digit)
    }
}

impl fmt::Debug for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file_name())
    }
}

impl fmt::Display for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.abstract_name())
    }
}
