//! Legacy CUDA IPC: `cuIpcGetMemHandle`, `cuIpcOpenMemHandle`, `cuIpcCloseMemHandle`. For `cuMemAlloc` memory only.

use std::collections::BTreeMap;

use cuda_driver_sys::{CUipcMemHandle_v1, CUresult};

use crate::abi::{Answer, INVALID, Out};
use crate::blob::{self, Blob};
use crate::chunks::ChunkId;
use crate::layout::ChunkKind;
use crate::process;
use crate::space::{Access, Kind};

/// Handles this process has open: address and number of opens.
#[derive(Default)]
pub(crate) struct Opened {
    by_chunk: BTreeMap<ChunkId, (u64, u64)>,
}

/// `cuIpcGetMemHandle`: the handle of the allocation, wherever in it the address is.
pub(crate) fn get(out: Out<CUipcMemHandle_v1>, address: u64) -> Answer {
    let process = process::lock()?;
    process.working()?;
    let (_, mapping) = process.space.mapping_at(address).ok_or(INVALID)?;
    let Kind::Plain { chunk, .. } = mapping.kind else { return Err(INVALID) };
    let bytes = Blob { what: blob::LEGACY, chunk, extra: [mapping.len, 0, 0] }.to_bytes();
    out.set(CUipcMemHandle_v1 { reserved: bytes.map(u8::cast_signed) })
}

/// `cuIpcOpenMemHandle_v2`: opening again counts.
pub(crate) fn open(out: Out<u64>, handle: CUipcMemHandle_v1, _flags: u32) -> Answer {
    out.check()?;
    let mut process = process::lock()?;
    let (context, _) = process.working()?;
    let bytes = handle.reserved.map(i8::cast_unsigned);
    let chunk = Blob::from_bytes(&bytes, blob::LEGACY).ok_or(INVALID)?.chunk;
    if let Some((base, opens)) = process.opened.by_chunk.get_mut(&chunk) {
        *opens += 1;
        return out.set(*base);
    }
    if process.is_held(chunk) {
        // The allocation is this process's own.
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    process.ordinal(chunk.gpu).ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    let info = process.hold(chunk, ChunkKind::Plain).ok_or(INVALID)?;
    match process.place_chunk(chunk.gpu, info.offset, info.bytes, Access::ALL, Kind::Legacy { context, chunk }) {
        Ok(base) => {
            process.opened.by_chunk.insert(chunk, (base, 1));
            out.set(base)
        }
        Err(code) => {
            process.unhold(chunk);
            Err(code)
        }
    }
}

/// `cuIpcCloseMemHandle`.
pub(crate) fn close(address: u64) -> Answer {
    let mut process = process::lock()?;
    let Some((base, mapping)) = process.space.mapping_at(address) else { return Err(INVALID) };
    let Kind::Legacy { chunk, .. } = mapping.kind else { return Err(INVALID) };
    if base != address {
        return Err(INVALID);
    }
    if let Some((_, opens)) = process.opened.by_chunk.get_mut(&chunk) {
        *opens -= 1;
        if *opens > 0 {
            return Ok(());
        }
    }
    process.opened.by_chunk.remove(&chunk);
    process.free_allocation(base);
    Ok(())
}
