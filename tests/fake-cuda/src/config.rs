//! What the environment says: read once, by `cuInit`.

use core::ffi::c_int;
use std::path::{Path, PathBuf};

use crate::layout::MAX_DEVICES;

/// The settings of this process.
pub(crate) struct Config {
    /// `FAKE_CUDA_DIR`: the directory that processes of one fake machine share.
    pub(crate) dir: PathBuf,
    /// `FAKE_CUDA_MEMORY`: bytes per device. The first process of a directory decides.
    pub(crate) memory: u64,
    /// `FAKE_CUDA_DEVICES`: physical devices. The first process of a directory decides.
    pub(crate) devices: usize,
    /// `FAKE_CUDA_VA`: how many bytes of addresses may be reserved at a time.
    pub(crate) va: u64,
    /// `FAKE_CUDA_FABRIC=1`: fabric handles work, as on a machine with IMEX.
    pub(crate) fabric: bool,
    /// `FAKE_CUDA_PEERS=0`: no device reaches another's memory.
    pub(crate) peers: bool,
    /// `FAKE_CUDA_ASYNC`: 0 or unset, `hold`, or a delay in milliseconds.
    pub(crate) asynchronous: Asynchronous,
    visible: Option<String>,
}

/// When asynchronous operations complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asynchronous {
    /// Before the call returns.
    Off,
    /// On the worker thread, this many microseconds after the call.
    After(u64),
    /// When something synchronises with the stream, or the control API releases them.
    Hold,
}

impl Config {
    pub(crate) fn from_environment() -> Self {
        let number = |name: &str| var(name).and_then(|text| bytes(&text));
        Self {
            dir: var("FAKE_CUDA_DIR").map_or_else(default_dir, PathBuf::from),
            memory: number("FAKE_CUDA_MEMORY").unwrap_or(8 << 30).clamp(2 << 20, 1 << 40) & !((2 << 20) - 1),
            devices: number("FAKE_CUDA_DEVICES").and_then(|n| usize::try_from(n).ok()).unwrap_or(1).min(MAX_DEVICES),
            va: number("FAKE_CUDA_VA").unwrap_or(64 << 40),
            fabric: var("FAKE_CUDA_FABRIC").is_some_and(|text| text == "1"),
            peers: var("FAKE_CUDA_PEERS").is_none_or(|text| text != "0"),
            asynchronous: match var("FAKE_CUDA_ASYNC").as_deref() {
                None | Some("0" | "") => Asynchronous::Off,
                Some("hold") => Asynchronous::Hold,
                Some(text) => Asynchronous::After(text.parse::<u64>().unwrap_or(1) * 1000),
            },
            visible: var("CUDA_VISIBLE_DEVICES"),
        }
    }

    /// Physical numbers of the devices this process sees, in its order: `CUDA_VISIBLE_DEVICES` by ordinal or `GPU-` UUID prefix.
    ///
    /// As in CUDA, the list ends at the first entry that names no device or names one twice.
    pub(crate) fn visible(&self, physical: usize) -> Vec<usize> {
        let Some(list) = &self.visible else { return (0..physical).collect() };
        let mut seen = Vec::new();
        for entry in list.split(',').map(str::trim) {
            let found = match entry.strip_prefix("GPU-") {
                Some(prefix) => (0..physical).find(|&gpu| !prefix.is_empty() && uuid_text(gpu).starts_with(prefix)),
                None => entry.parse::<c_int>().ok().and_then(|n| usize::try_from(n).ok()).filter(|&n| n < physical),
            };
            match found {
                Some(gpu) if !seen.contains(&gpu) => seen.push(gpu),
                _ => break,
            }
        }
        seen
    }
}

/// The UUID of a physical device: the same in every process and for ever.
pub(crate) fn uuid(gpu: usize) -> [u8; 16] {
    let mut bytes = *b"\xfa\x4e\xc0\xda\x00\x00\x40\x00\x80\x00fake\x00\x00";
    bytes[15] = u8::try_from(gpu).unwrap_or(u8::MAX);
    bytes
}

fn uuid_text(gpu: usize) -> String {
    let hex: String = uuid(gpu).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Parses `8589934592`, `8G`, `512M`, `200GiB`.
fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match text[digits..].chars().next().map(|c| c.to_ascii_uppercase()) {
        None => 0,
        Some('K') => 10,
        Some('M') => 20,
        Some('G') => 30,
        Some('T') => 40,
        Some(_) => return None,
    };
    text[..digits].parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn default_dir() -> PathBuf {
    // SAFETY: geteuid takes nothing, touches nothing and cannot fail.
    let uid = unsafe { libc::geteuid() };
    let shm = Path::new("/dev/shm");
    let parent = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
    parent.join(format!("fake-cuda-{uid}"))
}
