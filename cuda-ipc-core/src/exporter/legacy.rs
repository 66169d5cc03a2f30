//! Export of `cuMemAlloc` memory: its legacy handle, which stands for the whole allocation.

use super::{Export, Shared};
use crate::dispatch::Lane;
use crate::own_handles::OwnHandle;
use crate::reason::Cause;
use crate::rkey::Payload;
use std::sync::Arc;

/// How often the allocation is looked at anew while it is freed and replaced.
const ATTEMPTS: u32 = 4;

impl Shared {
    /// Exports the allocation that `[address, address + len)` lies in.
    pub(super) fn export_legacy(self: &Arc<Self>, address: u64, len: u64) -> Result<Export, Cause> {
        self.cuda.with_relaxed_capture(|| {
            for _ in 0..ATTEMPTS {
                if let Some(export) = self.try_legacy(address, len)? {
                    return Ok(export);
                }
            }
            Err(Cause::KeptChanging)
        })
    }

    fn try_legacy(self: &Arc<Self>, address: u64, len: u64) -> Result<Option<Export>, Cause> {
        let facts = self.cuda.pointer_facts(address)?;
        let (Lane::Legacy, Some(context)) = (self.lane(address, &facts)?, facts.context) else { return Ok(None) };
        let (handle, (base, allocation_len)) = self.cuda.export_legacy(context, address)?;
        let device = self.cuda.device_uuid(facts.device)?;
        if self.cuda.buffer_id(base)? != Some(facts.buffer_id) {
            return Ok(None);
        }
        if address.checked_sub(base).is_none_or(|offset| offset > allocation_len || len > allocation_len - offset) {
            return Err(Cause::LeavesAllocation { base, len: allocation_len });
        }
        let own = OwnHandle::new(handle, base)?;
        self.lock().remember_place(base, allocation_len);
        Ok(Some(Export {
            shared: self.clone(),
            payload: Payload::Legacy(handle),
            // Importers map the whole allocation and need to know where it begins.
            address: base,
            len: allocation_len,
            device,
            chunks: Vec::new(),
            _own: Some(own),
        }))
    }
}
