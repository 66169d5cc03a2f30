//! What the loader's work depends on in an ELF file.

use std::fs::File;
use std::io::{Read, Result};
use std::path::Path;

use object::elf::{ELFMAG, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind, ReadCache};

/// An ELF file's word size, machine and interpreter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in super::super) struct Elf {
    is_64: bool,
    machine: u16,
    /// PT_INTERP: the dynamic loader.
    interpreter: Option<Vec<u8>>,
}

impl Elf {
    /// Reads the headers of a file, and not more. `None` if it is not ELF, or cut off.
    pub(in super::super) fn read(path: &Path) -> Result<Option<Self>> {
        let file = File::open(path)?;
        let data = ReadCache::new(file);
        Ok(match FileKind::parse(&data) {
            Ok(FileKind::Elf32) => Self::of::<FileHeader32<Endianness>>(&data),
            Ok(FileKind::Elf64) => Self::of::<FileHeader64<Endianness>>(&data),
            _ => None,
        })
    }

    /// Whether a file that [`Elf::read`] makes nothing of is ELF all the same: damaged, or cut off.
    pub(super) fn is_damaged(path: &Path) -> bool {
        let mut magic = [0; ELFMAG.len()];
        File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok_and(|()| magic == ELFMAG)
    }

    fn of<Header: FileHeader<Endian = Endianness>>(data: &ReadCache<File>) -> Option<Self> {
        let header = Header::parse(data).ok()?;
        let endian = header.endian().ok()?;
        let mut interpreter = None;
        for segment in header.program_headers(endian, data).ok()? {
            interpreter = segment.interpreter(endian, data).ok()?.or(interpreter);
        }
        Some(Self { is_64: header.is_class_64(), machine: header.e_machine(endian).0, interpreter: interpreter.map(<[u8]>::to_vec) })
    }

    /// Whether no loader runs in this program.
    pub(super) fn is_static(&self) -> bool {
        self.interpreter.is_none()
    }

    /// Whether both are for one architecture.
    pub(super) fn runs_on(&self, other: &Self) -> bool {
        (self.is_64, self.machine) == (other.is_64, other.machine)
    }

    pub(super) fn is_musl(&self) -> bool {
        let interpreter = self.interpreter.as_deref().unwrap_or_default();
        interpreter.rsplit(|&byte| byte == b'/').next().is_some_and(|file| file.starts_with(b"ld-musl"))
    }
}
