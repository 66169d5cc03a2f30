//! What the processes of a storm know of each other: files in the machine's directory, which are whole or not there whenever somebody is killed.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use cuda_ipc_core::rkey::Rkey;

/// Granules of each exporter's reservation.
pub(crate) const GRANULES: usize = 12;
/// Variables that tell a process its place, and its life among all.
pub(crate) const NUMBER: &str = "CUDA_IPC_STORM_NUMBER";
pub(crate) const LIFE: &str = "CUDA_IPC_STORM_LIFE";

pub(crate) fn number(variable: &str) -> u64 {
    std::env::var(variable).unwrap().parse().unwrap()
}

/// What an exporter says: who it is, its key, and for each granule the generation that is published there, or 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Notice {
    pub(crate) life: u64,
    pub(crate) rkey: Rkey,
    pub(crate) generations: [u64; GRANULES],
}

pub(crate) struct Board {
    directory: PathBuf,
}

impl Board {
    pub(crate) fn new() -> Self {
        Self { directory: std::env::var_os("FAKE_CUDA_DIR").unwrap().into() }
    }

    pub(crate) fn sockets(&self) -> PathBuf {
        self.directory.join("sockets")
    }

    /// Puts an exporter's notice in the place of its last one.
    pub(crate) fn put(&self, number: u64, notice: &Notice) {
        let mut bytes = notice.life.to_le_bytes().to_vec();
        bytes.extend(notice.rkey.encode());
        bytes.extend(notice.generations.iter().flat_map(|generation| generation.to_le_bytes()));
        let new = self.directory.join(format!("new-{number}"));
        std::fs::write(&new, bytes).unwrap();
        std::fs::rename(new, self.directory.join(format!("exporter-{number}"))).unwrap();
    }

    /// The last notice of a place.
    pub(crate) fn get(&self, number: u64) -> Option<Notice> {
        let bytes = std::fs::read(self.directory.join(format!("exporter-{number}"))).ok()?;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let end = bytes.len() - 8 * GRANULES;
        let rkey = Rkey::decode(&bytes[8..end]).unwrap();
        Some(Notice { life: word(0), rkey, generations: core::array::from_fn(|at| word(end + 8 * at)) })
    }

    /// Counts something. One byte at the end of a file: the kernel adds it whole, whoever is killed.
    pub(crate) fn tally(&self, name: &str) {
        self.append(&format!("count {name}"), b".");
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        std::fs::metadata(self.directory.join(format!("count {name}"))).map_or(0, |metadata| metadata.len())
    }

    /// All counts.
    pub(crate) fn summary(&self) -> String {
        let files = std::fs::read_dir(&self.directory).unwrap();
        let counts: BTreeMap<String, u64> = files
            .filter_map(|file| {
                let file = file.unwrap();
                let name = file.file_name().into_string().unwrap().strip_prefix("count ")?.to_owned();
                Some((name, file.metadata().unwrap().len()))
            })
            .collect();
        counts.iter().map(|(name, count)| format!("{name}: {count}")).collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn add_nonce(&self, nonce: u64) {
        self.append("nonces", &nonce.to_le_bytes());
    }

    pub(crate) fn nonces(&self) -> Vec<u64> {
        let bytes = std::fs::read(self.directory.join("nonces")).unwrap();
        bytes.as_chunks::<8>().0.iter().map(|nonce| u64::from_le_bytes(*nonce)).collect()
    }

    fn append(&self, name: &str, bytes: &[u8]) {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(self.directory.join(name));
        file.unwrap().write_all(bytes).unwrap();
    }

    /// Tells all that it is over.
    pub(crate) fn stop(&self) {
        std::fs::write(self.directory.join("stop"), "").unwrap();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.directory.join("stop").exists()
    }
}
