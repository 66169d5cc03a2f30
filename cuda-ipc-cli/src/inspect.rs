//! `cuda-ipc inspect`: what a key or rkey says, and whether its exporter can be reached from here, now.
//!
//! This file is the command and its text; `inspect/key.rs` finds out what there is to say of a key, `inspect/reach.rs` what its table says.

mod key;
mod reach;

use core::fmt::{self, Write};

use cuda_ipc_core::key::{KEY_LEN, KEY_MAGIC, Key};
use cuda_ipc_core::rkey::{Payload, RKEY_LEN, RKEY_MAGIC, Rkey};
use serde::Serialize;

use crate::failure::Failure;
use crate::hex;
use crate::output;
use crate::size;
use key::KeyReport;

/// Decode a key or an rkey and see whether its exporter can be reached.
///
/// Prints every field, whether the key was made on this machine, whether its process is here, and, if its export table can be opened now, which chunks
/// are in the reservation. Needs no GPU and changes nothing.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The 64 bytes of a key or the 108 bytes of an rkey; white space and colons between the digits and 0x in front are allowed
    #[arg(value_name = "HEX", required = true, num_args = 1..)]
    hex: Vec<String>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// All there is to say. Addresses and identities are hex texts: they are names, not quantities.
#[derive(Serialize)]
struct Report {
    /// `key` or `rkey`.
    what: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rkey: Option<RkeyReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<KeyReport>,
}

#[derive(Serialize)]
struct RkeyReport {
    handle_type: &'static str,
    base: String,
    end: String,
    len: u64,
    gpu_uuid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    legacy_handle: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let bytes = hex::decode(&args.hex.concat()).map_err(Failure::Usage)?;
    let report = Report::of(&bytes)?;
    if args.json { output::json(&report) } else { output::text(&report) }
}

impl Report {
    fn of(bytes: &[u8]) -> Result<Self, Failure> {
        // The length decides; where it fits neither, the magic says which of the two was meant.
        let is_rkey = bytes.len() == RKEY_LEN || (bytes.len() != KEY_LEN && bytes.starts_with(&RKEY_MAGIC));
        if !is_rkey && bytes.len() != KEY_LEN && !bytes.starts_with(&KEY_MAGIC) {
            let cause = format!("a key has {KEY_LEN} bytes and an rkey {RKEY_LEN}, these are {}", bytes.len());
            return Err(Failure::new("decoding", cause));
        }
        if !is_rkey {
            let key = Key::decode(bytes).map_err(Failure::at("decoding the key"))?;
            return Ok(Self { what: "key", rkey: None, key: Some(KeyReport::of(&key)) });
        }
        let rkey = Rkey::decode(bytes).map_err(Failure::at("decoding the rkey"))?;
        let (handle_type, legacy_handle, key) = match rkey.payload {
            Payload::NoIpc => ("none", None, None),
            Payload::Legacy(handle) => ("legacy IPC", Some(hex::encode(&handle)), None),
            Payload::Posix(key) => ("POSIX fd", None, Some(KeyReport::of(&key))),
            _ => ("unknown to this program", None, None),
        };
        let fields = RkeyReport {
            handle_type,
            base: address(rkey.base),
            end: address(rkey.base + rkey.len),
            len: rkey.len,
            gpu_uuid: hex::uuid(&rkey.device),
            legacy_handle,
        };
        Ok(Self { what: "rkey", rkey: Some(fields), key })
    }
}

/// An address, as both kinds of output have it.
fn address(address: u64) -> String {
    format!("{address:#x}")
}

/// Writes lines of a name and what it stands for.
struct Lines<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Lines<'_, '_> {
    fn line(&mut self, name: &str, value: impl fmt::Display) -> fmt::Result {
        writeln!(self.0, "  {name:18}{value}")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rkey) = &self.rkey {
            writeln!(f, "rkey, {RKEY_LEN} bytes")?;
            let mut lines = Lines(f);
            lines.line("range", format_args!("{} to {}, {}", rkey.base, rkey.end, size::exact(rkey.len)))?;
            lines.line("GPU", &rkey.gpu_uuid)?;
            match rkey.handle_type {
                "none" => lines.line("handle type", "none: the exporter says that this memory cannot be shared")?,
                "legacy IPC" => lines.line("handle type", "legacy IPC: a CUipcMemHandle, for cuIpcOpenMemHandle")?,
                other => lines.line("handle type", other)?,
            }
            if let Some(handle) = &rkey.legacy_handle {
                lines.line("handle", handle)?;
            }
        }
        match &self.key {
            Some(key) => {
                if self.rkey.is_some() {
                    f.write_char('\n')?;
                }
                key.fmt(f)
            }
            None => Ok(()),
        }
    }
}
