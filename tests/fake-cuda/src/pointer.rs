//! What a pointer is: `cuPointerGetAttribute(s)`, `cuMemGetAddressRange`, `cuMemRangeGetAttribute`.
//!
//! The singular query fails on a pointer the driver does not know; the plural one answers null values and succeeds. An address without a mapping is a
//! host's to the plural query, and room of a reservation still has its range. Where no device has access, there is neither an address range nor a device
//! pointer.

use core::ffi::c_void;

use cuda_driver_sys::{CUmem_range_attribute, CUpointer_attribute, CUresult};

use crate::abi::{Answer, INVALID, In, List, Out};
use crate::process::{self, Process};
use crate::space::{Kind, Mapping, Place};

/// An attribute's value, in the width that the driver writes.
enum Value {
    Word(u64),
    Half(u32),
    /// `CUDA_POINTER_ATTRIBUTE_P2P_TOKENS` without its padding; the fake has no tokens.
    Tokens,
}

impl Value {
    fn store(self, out: Out<c_void>) -> Answer {
        match self {
            Self::Word(value) => Out::<u64>::cast(out).set(value),
            Self::Half(value) => Out::<u32>::cast(out).set(value),
            Self::Tokens => Out::<[u8; 12]>::cast(out).set([0; 12]),
        }
    }
}

const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// `cuPointerGetAttribute`.
pub(crate) fn attribute(out: Out<c_void>, attribute: CUpointer_attribute, address: u64) -> Answer {
    out.check()?;
    let process = process::lock()?;
    value(&process, attribute, address)?.store(out)
}

/// `cuPointerGetAttributes`.
pub(crate) fn attributes(count: u32, attributes: List<CUpointer_attribute>, outs: List<*mut c_void>, address: u64) -> Answer {
    let process = process::lock()?;
    for index in 0..count as usize {
        let attribute = attributes.at(index)?;
        if attribute == CUpointer_attribute::CU_POINTER_ATTRIBUTE_P2P_TOKENS {
            return Err(INVALID);
        }
        let null = || null_value(&process, attribute, address).ok_or(INVALID);
        value(&process, attribute, address).or_else(|_| null())?.store(Out::of(outs.at(index)?))?;
    }
    Ok(())
}

/// `cuPointerSetAttribute`: `SYNC_MEMOPS` is accepted, and nothing comes of it.
pub(crate) fn set_attribute(_value: In<c_void>, attribute: CUpointer_attribute, address: u64) -> Answer {
    let process = process::lock()?;
    let known = process.space.mapping_at(address).is_some();
    if known && attribute == CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS { Ok(()) } else { Err(INVALID) }
}

/// `cuMemGetAddressRange_v2`: the allocation, which for VMM memory is the mapped chunk.
pub(crate) fn address_range(base: Out<u64>, size: Out<usize>, address: u64) -> Answer {
    let process = process::lock()?;
    process.working()?;
    let found = process.space.mapping_at(address).filter(|(_, mapping)| !mapping.access.is_none());
    let (start, mapping) = found.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
    base.set_if_given(start);
    size.set_if_given(usize::try_from(mapping.len).map_err(|_| INVALID)?);
    Ok(())
}

/// `cuMemRangeGetAttribute`: only of managed memory, which the fake prefers nowhere.
pub(crate) fn range_attribute(out: Out<c_void>, bytes: usize, _attribute: CUmem_range_attribute, address: u64, _count: usize) -> Answer {
    out.check()?;
    let process = process::lock()?;
    let (_, mapping) = process.space.mapping_at(address).ok_or(INVALID)?;
    if bytes == 4 && matches!(mapping.kind, Kind::Managed { .. }) {
        // CU_DEVICE_INVALID
        return Out::<i32>::cast(out).set(-2);
    }
    Err(INVALID)
}

fn value(process: &Process, attribute: CUpointer_attribute, address: u64) -> Result<Value, CUresult> {
    use CUpointer_attribute as A;
    let (base, mapping) = process.space.mapping_at(address).ok_or(INVALID)?;
    let kind = mapping.kind;
    Ok(match attribute {
        A::CU_POINTER_ATTRIBUTE_CONTEXT => Value::Word(context(kind)),
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => Value::Half(if is_host(kind) { HOST } else { DEVICE }),
        A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER if !mapping.access.is_none() => Value::Word(address),
        A::CU_POINTER_ATTRIBUTE_HOST_POINTER if !kind.is_device() => Value::Word(address),
        A::CU_POINTER_ATTRIBUTE_P2P_TOKENS if !is_host(kind) => Value::Tokens,
        A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => Value::Half(u32::from(!is_host(kind))),
        A::CU_POINTER_ATTRIBUTE_BUFFER_ID => Value::Word(mapping.buffer_id),
        A::CU_POINTER_ATTRIBUTE_IS_MANAGED => Value::Half(u32::from(matches!(kind, Kind::Managed { .. }))),
        A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Half(ordinal(process, mapping).cast_unsigned()),
        A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => Value::Half(u32::from(matches!(kind, Kind::Plain { .. }))),
        A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => Value::Word(range(process, base, mapping, address).0),
        A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => Value::Word(range(process, base, mapping, address).1),
        A::CU_POINTER_ATTRIBUTE_MAPPED => Value::Half(1),
        A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => Value::Word(u64::from(handle_types(process, kind))),
        A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => Value::Half(u32::from(is_rdma_capable(process, kind))),
        A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => Value::Half(access(process, mapping)),
        A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => Value::Word(match kind {
            Kind::Pooled { pool, .. } | Kind::PoolImport { pool, .. } => pool,
            _ => 0,
        }),
        A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => Value::Word(mapping.len),
        A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => Value::Word(base),
        A::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => Value::Word(mapping.buffer_id),
        A::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => Value::Half(u32::from(matches!(kind, Kind::Plain { .. }))),
        _ => return Err(INVALID),
    })
}

/// What the plural query answers where there is nothing to say; `None` for an attribute that does not exist.
fn null_value(process: &Process, attribute: CUpointer_attribute, address: u64) -> Option<Value> {
    use CUpointer_attribute as A;
    let range = || process.space.reservation_at(address).filter(|(_, reservation)| reservation.by_user);
    Some(match attribute {
        A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Half((-2_i32).cast_unsigned()),
        A::CU_POINTER_ATTRIBUTE_HOST_POINTER => Value::Word(if process.space.mapping_at(address).is_some() { 0 } else { address }),
        A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => Value::Word(range().map_or(0, |(base, _)| base)),
        A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => Value::Word(range().map_or(0, |(_, reservation)| reservation.size)),
        A::CU_POINTER_ATTRIBUTE_CONTEXT
        | A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        | A::CU_POINTER_ATTRIBUTE_BUFFER_ID
        | A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        | A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        | A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE
        | A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR
        | A::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => Value::Word(0),
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        | A::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | A::CU_POINTER_ATTRIBUTE_IS_MANAGED
        | A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | A::CU_POINTER_ATTRIBUTE_MAPPED
        | A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS
        | A::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => Value::Half(0),
        _ => return None,
    })
}

fn is_host(kind: Kind) -> bool {
    matches!(kind, Kind::HostAlloc { .. } | Kind::HostRegistered { .. })
}

/// VMM and pool memory belong to no context.
fn context(kind: Kind) -> u64 {
    match kind {
        Kind::Plain { context, .. } | Kind::Legacy { context, .. } | Kind::Managed { context } => context,
        Kind::HostAlloc { context } | Kind::HostRegistered { context } => context,
        Kind::Vmm { .. } | Kind::Pooled { .. } | Kind::PoolImport { .. } => 0,
    }
}

fn ordinal(process: &Process, mapping: &Mapping) -> i32 {
    match mapping.place {
        Place::Arena { gpu, .. } => process.ordinal(gpu).and_then(|device| i32::try_from(device).ok()).unwrap_or(-1),
        Place::Here => 0,
    }
}

/// The reservation for VMM memory, the allocation for the rest.
fn range(process: &Process, base: u64, mapping: &Mapping, address: u64) -> (u64, u64) {
    match (mapping.kind, process.space.reservation_at(address)) {
        (Kind::Vmm { .. }, Some((start, reservation))) => (start, reservation.size),
        // Beyond the reservation it was mapped into.
        (Kind::Vmm { .. }, None) => (0, 0),
        _ => (base, mapping.len),
    }
}

fn handle_types(process: &Process, kind: Kind) -> u32 {
    match kind {
        Kind::Vmm { handle } => process.handles.object(handle).map_or(0, |object| object.types),
        Kind::Pooled { pool, .. } => process.pools.handle_types(pool),
        _ => 0,
    }
}

fn is_rdma_capable(process: &Process, kind: Kind) -> bool {
    match kind {
        Kind::Vmm { handle } => process.handles.object(handle).is_some_and(|object| object.rdma),
        Kind::Plain { .. } | Kind::Legacy { .. } => true,
        _ => false,
    }
}

fn access(process: &Process, mapping: &Mapping) -> u32 {
    let device = process.current().map_or(0, |(_, device)| device);
    u32::try_from(mapping.access.of(device)).unwrap_or(0)
}
