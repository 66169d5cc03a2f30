//! Environment variables that decide how processes share memory, for every library that takes them: what each is called, which values it takes and what they mean.
//!
//! Nothing is read from the process here, and no default is filled in: the caller says where variables come from, and what holds where one is not set. An empty
//! variable is one that is not set.

use core::fmt;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use cuda_ipc_core::importer::Route;

/// A variable has a value that it does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongVariable {
    /// Its name.
    pub name: &'static str,
}

impl fmt::Display for WrongVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the environment variable {} has a value that it does not take", self.name)
    }
}

impl core::error::Error for WrongVariable {}

/// The variables, as `F` finds them by name.
#[derive(Clone, Copy, Debug)]
pub struct Environment<F>(F);

const YES_NO: &[(&str, bool)] =
    &[("y", true), ("yes", true), ("on", true), ("1", true), ("n", false), ("no", false), ("off", false), ("0", false)];

impl<F: Fn(&str) -> Option<OsString>> Environment<F> {
    /// Variables as `find` finds them; `|name| std::env::var_os(name)` for this process's.
    pub const fn new(find: F) -> Self {
        Self(find)
    }

    /// CUDA_IPC_ROUTE=auto|pidfd|broker: how exporters are reached.
    pub fn route(&self) -> Result<Option<Route>, WrongVariable> {
        self.word("CUDA_IPC_ROUTE", &[("auto", Route::Auto), ("pidfd", Route::Pidfd), ("broker", Route::Broker)])
    }

    /// CUDA_IPC_BROKER=y|n: whether importers can ask a thread of the exporter for fds.
    pub fn broker(&self) -> Result<Option<bool>, WrongVariable> {
        self.word("CUDA_IPC_BROKER", YES_NO)
    }

    /// CUDA_IPC_PTRACER=any|none: whether every process of the user is let trace this one.
    pub fn ptracer(&self) -> Result<Option<bool>, WrongVariable> {
        self.word("CUDA_IPC_PTRACER", &[("any", true), ("none", false)])
    }

    /// CUDA_IPC_SOCKET_DIR: folder of the broker's socket files, of exporters and importers alike.
    pub fn socket_dir(&self) -> Option<PathBuf> {
        self.value("CUDA_IPC_SOCKET_DIR").map(PathBuf::from)
    }

    /// CUDA_IPC_MAP=eager|lazy: whether an import maps what there is, or the first use does.
    pub fn eager(&self) -> Result<Option<bool>, WrongVariable> {
        self.word("CUDA_IPC_MAP", &[("eager", true), ("lazy", false)])
    }

    /// CUDA_IPC_CACHE_MAX_WINDOWS: windows that may keep address space while they are idle.
    pub fn max_windows(&self) -> Result<Option<u64>, WrongVariable> {
        self.number("CUDA_IPC_CACHE_MAX_WINDOWS")
    }

    /// CUDA_IPC_CACHE_MAX_SIZE: bytes that may stay mapped while they are idle.
    pub fn max_mapped_bytes(&self) -> Result<Option<u64>, WrongVariable> {
        self.number("CUDA_IPC_CACHE_MAX_SIZE")
    }

    /// The value of a variable; `None` where it is empty or not set.
    pub fn value(&self, name: &str) -> Option<OsString> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    /// The meaning of a variable's value, in any case of letters. Errors: it is none of `words`.
    pub fn word<T: Copy>(&self, name: &'static str, words: &[(&str, T)]) -> Result<Option<T>, WrongVariable> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let found = words.iter().find(|(word, _)| value.as_bytes().eq_ignore_ascii_case(word.as_bytes()));
        found.map(|(_, meaning)| Some(*meaning)).ok_or(WrongVariable { name })
    }

    fn number(&self, name: &'static str) -> Result<Option<u64>, WrongVariable> {
        let Some(value) = self.value(name) else { return Ok(None) };
        number(&value).map(Some).ok_or(WrongVariable { name })
    }
}

/// A number other than 0, which may end with k, m, g or t and then b; or `inf`.
fn number(value: &OsStr) -> Option<u64> {
    let text = value.to_str()?.to_ascii_lowercase();
    if text == "inf" {
        return Some(u64::MAX);
    }
    let text = text.strip_suffix('b').unwrap_or(&text);
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k')) => (text.get(..at), 10),
        Some((at, 'm')) => (text.get(..at), 20),
        Some((at, 'g')) => (text.get(..at), 30),
        Some((at, 't')) => (text.get(..at), 40),
        _ => (Some(text), 0),
    };
    digits?.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|&number| number != 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let size = |text: &str| number(OsStr::new(text));
        assert_eq!(size("17"), Some(17));
        assert_eq!((size("2k"), size("2M"), size("2gb"), size("2T")), (Some(2 << 10), Some(2 << 20), Some(2 << 30), Some(2 << 40)));
        assert_eq!((size("inf"), size("1.5g"), size(" 1"), size("g"), size("99999999t")), (Some(u64::MAX), None, None, None, None));
    }

    #[test]
    fn words_are_read_in_any_case_and_nothing_else_is() {
        let environment = |value: &'static str| Environment::new(move |_: &str| Some(OsString::from(value)));
        assert_eq!((environment("Broker").route(), environment("").route()), (Ok(Some(Route::Broker)), Ok(None)));
        assert_eq!((environment("EAGER").eager(), environment("lazy").eager()), (Ok(Some(true)), Ok(Some(false))));
        assert_eq!(environment("later").eager(), Err(WrongVariable { name: "CUDA_IPC_MAP" }));
        assert_eq!(environment("0").max_windows(), Err(WrongVariable { name: "CUDA_IPC_CACHE_MAX_WINDOWS" }));
        assert_eq!((environment("some/dir").socket_dir(), environment("").socket_dir()), (Some("some/dir".into()), None));
    }
}
