//! Whether UCX's calls come here at all: where the linkage tables of its CUDA module lead.
//!
//! A UCX that was built to load its modules with RTLD_DEEPBIND, or a program that loads them so, binds them to the driver and not to us. UCM's hooks in their
//! relocation mode lead some functions of the module into UCM, and from there to the driver. Both lose the lane without a word, so the tables are read:
//! what is not bound yet is nobody's, what is bound elsewhere is named.
//!
//! # Safety
//! The unsafe here is dl_iterate_phdr, and reading loaded modules inside its callback, in which nothing is unloaded. A read stays in one readable segment of the
//! module that the loader describes.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation, reason = "addresses of this 64-bit process")]

use core::ffi::{CStr, c_int, c_void};
use core::fmt;
use core::ptr;

use cuda_driver_sys::LIBRARY;

use crate::callers::is_ucx_module;
use crate::handlers::HANDLERS;
use crate::names::Name;
use crate::report;

/// A function of UCX's that does not lead here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Bypass {
    name: Name,
    /// File name of the module that it leads to.
    to: String,
}

impl fmt::Display for Bypass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, to } = self;
        write!(f, "UCX's {name:?} goes to {to} and not to the preload library: ")?;
        if to.starts_with("libucm") {
            f.write_str("its hooks are in mode reloc; unset UCX_MEM_CUDA_HOOK_MODE, or set it to bistro or none")
        } else if LIBRARY.to_bytes() == to.as_bytes() {
            f.write_str(
                "its CUDA module was loaded with RTLD_DEEPBIND; use a UCX built without --enable-module-deepbind, and unset NIXL_UCX_DEEPBIND",
            )
        } else {
            f.write_str("put the preload library in front of it in LD_PRELOAD")
        }
    }
}

/// The first function of a loaded UCX CUDA module that we would answer and that is bound to something else.
pub(crate) fn look() -> Option<Bypass> {
    let own = module_of(look as fn() -> Option<Bypass> as usize)?;
    let mut bound = None;
    each_module(&mut |module| {
        if !is_ucx_module(module.path) {
            return false;
        }
        bound = module.first_slot(|name, target| {
            let is_answered = HANDLERS.get(name as usize).copied().flatten().is_some();
            is_answered && !module.contains(target) && !own.contains(&target)
        });
        bound.is_some()
    });
    let (name, target) = bound?;
    let mut to = None;
    each_module(&mut |module| {
        if module.contains(target) {
            to = Some(String::from_utf8_lossy(module.file()).into_owned());
        }
        to.is_some()
    });
    Some(Bypass { name, to: to.unwrap_or_else(|| format!("{target:#x}")) })
}

/// Says at UCX's first call what will go past us: hooks are set later than that.
pub(crate) fn foretell() {
    let mode = std::env::var("UCX_MEM_CUDA_HOOK_MODE").unwrap_or_default();
    if mode.split(',').any(|mode| mode.eq_ignore_ascii_case("reloc")) {
        let text = "is set, and with such hooks UCX's calls go past the preload library, so the lane is lost: unset it, or set it to bistro or none";
        report::warn(report::Cause::Bypassed, &format_args!("UCX_MEM_CUDA_HOOK_MODE={mode} {text}"));
    }
}

/// The addresses of the module around `address`.
fn module_of(address: usize) -> Option<core::ops::Range<usize>> {
    let mut found = None;
    each_module(&mut |module| {
        if module.contains(address) {
            found = module.span();
        }
        found.is_some()
    });
    found
}

/// A loaded module, for the time of the loader's callback.
struct Module<'a> {
    path: &'a [u8],
    base: usize,
    segments: &'a [libc::Elf64_Phdr],
}

/// Relocations that a call goes by.
#[cfg(target_arch = "x86_64")]
const BINDINGS: [u64; 2] = [6, 7];
#[cfg(target_arch = "aarch64")]
const BINDINGS: [u64; 2] = [1025, 1026];

impl Module<'_> {
    fn file(&self) -> &[u8] {
        self.path.rsplit(|&byte| byte == b'/').next().unwrap_or(self.path)
    }

    fn loaded(&self) -> impl Iterator<Item = core::ops::Range<usize>> {
        let range = |segment: &libc::Elf64_Phdr| {
            let start = self.base.wrapping_add(segment.p_vaddr as usize);
            start..start.wrapping_add(segment.p_memsz as usize)
        };
        let readable = |segment: &&libc::Elf64_Phdr| segment.p_type == libc::PT_LOAD && segment.p_flags & libc::PF_R != 0;
        self.segments.iter().filter(readable).map(range)
    }

    fn contains(&self, address: usize) -> bool {
        self.loaded().any(|range| range.contains(&address))
    }

    fn span(&self) -> Option<core::ops::Range<usize>> {
        Some(self.loaded().map(|range| range.start).min()?..self.loaded().map(|range| range.end).max()?)
    }

    /// The value at an address of this module; `None` outside of it.
    fn read<T: Number>(&self, address: usize) -> Option<T> {
        let end = address.checked_add(size_of::<T>())?;
        if !self.loaded().any(|range| range.start <= address && end <= range.end) {
            return None;
        }
        // SAFETY: inside of one readable segment of a module that stays loaded while the loader's callback runs; any bytes are a number.
        Some(unsafe { ptr::read_unaligned(address as *const T) })
    }

    /// A value of the dynamic section that is an address. Some loaders have added the module's base to it already.
    fn dynamic(&self, tag: u64) -> Option<usize> {
        let segment = self.segments.iter().find(|segment| segment.p_type == libc::PT_DYNAMIC)?;
        let mut at = self.base.wrapping_add(segment.p_vaddr as usize);
        loop {
            let (found, value): (u64, u64) = (self.read(at)?, self.read(at + 8)?);
            match found {
                0 => return None,
                _ if found == tag => return Some(value as usize),
                _ => at += 16,
            }
        }
    }

    fn pointer(&self, tag: u64) -> Option<usize> {
        let value = self.dynamic(tag)?;
        Some(if self.contains(value) { value } else { self.base.wrapping_add(value) })
    }

    /// The first interposed name whose slot holds a target that `wanted` accepts.
    fn first_slot(&self, wanted: impl Fn(Name, usize) -> bool) -> Option<(Name, usize)> {
        const STRTAB: u64 = 5;
        const SYMTAB: u64 = 6;
        const TABLES: [(u64, u64); 2] = [(23, 2), (7, 8)];
        let (names, symbols) = (self.pointer(STRTAB)?, self.pointer(SYMTAB)?);
        for (table, size) in TABLES {
            let (Some(table), Some(size)) = (self.pointer(table), self.dynamic(size)) else { continue };
            for entry in (table..table.wrapping_add(size)).step_by(24) {
                let (place, info): (u64, u64) = (self.read(entry)?, self.read(entry + 8)?);
                if !BINDINGS.contains(&(info & 0xffff_ffff)) {
                    continue;
                }
                let symbol: u32 = self.read(symbols + 24 * (info >> 32) as usize)?;
                let Some(name) = self.name(names + symbol as usize) else { continue };
                let target: u64 = self.read(self.base.wrapping_add(place as usize))?;
                if target != 0 && wanted(name, target as usize) {
                    return Some((name, target as usize));
                }
            }
        }
        None
    }

    /// The interposed name that is written there.
    fn name(&self, at: usize) -> Option<Name> {
        let is =
            |name: &&Name| name.symbol().to_bytes_with_nul().iter().enumerate().all(|(offset, &byte)| self.read(at + offset) == Some(byte));
        Name::ALL.iter().find(is).copied()
    }
}

/// Types of which any bytes are a value.
trait Number: Copy {}
impl Number for u8 {}
impl Number for u32 {}
impl Number for u64 {}

/// Calls `with` for each loaded module until it returns `true`.
fn each_module(with: &mut dyn FnMut(&Module<'_>) -> bool) {
    struct Call<'a>(&'a mut dyn FnMut(&Module<'_>) -> bool);
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _size: usize, call: *mut c_void) -> c_int {
        // SAFETY: the loader passes a valid record for the time of the call.
        let info = unsafe { &*info };
        // SAFETY: the local of `each_module`.
        let call = unsafe { &mut *call.cast::<Call<'_>>() };
        if info.dlpi_name.is_null() || info.dlpi_phdr.is_null() {
            return 0;
        }
        // SAFETY: not null, so a C string for the time of the call.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
        // SAFETY: the record's program headers, as many as it says.
        let segments = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        c_int::from((call.0)(&Module { path, base: info.dlpi_addr as usize, segments }))
    }
    let mut call = Call(with);
    // SAFETY: the callback has the right signature, does not unwind through the loader as what it calls does not panic, and `call` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut call).cast()) };
}
