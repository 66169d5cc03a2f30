//! Which calls need a context, and what ends with one.

use std::os::fd::AsRawFd;

use cuda_driver_sys::{CUpointer_attribute as PointerAttribute, CUresult};
use cuda_ipc_tests::driver::{Answer, Cuda, Inside};

use crate::facts::{Facts, Row, own};
use crate::{CHUNK, INVALID_CONTEXT, INVALID_VALUE, OK, POSIX_FD, READ_WRITE};

#[test]
fn without_context() {
    let Some(_) = Inside::enter_with_any_driver("contexts::without_context") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::new(cuda, 1, 4);
    let fd = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    let (base, handle) = (row.base, row.handles[0]);
    let (plain, room) = (cuda.mem_alloc(CHUNK).expect("cuMemAlloc"), row.at(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            facts.known("without a context: cuCtxGetCurrent is null", cuda.ctx_get_current().map(|context| context.is_null()), Ok(true));
            let mut say = |what: &str, answer: Answer, expected| facts.code(&format!("without a context: {what}"), answer, expected);
            say("BUFFER_ID", cuda.buffer_id(base).map(drop), OK);
            say("BUFFER_ID of cuMemAlloc memory", cuda.buffer_id(plain).map(drop), OK);
            say("RANGE_START_ADDR", cuda.attribute(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, base).map(drop), OK);
            say("plural BUFFER_ID", cuda.attribute_plural(PointerAttribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, base).map(drop), OK);
            say("cuMemGetAddressRange", cuda.address_range(base).map(drop), INVALID_CONTEXT);
            say("cuMemGetAddressRange of cuMemAlloc memory", cuda.address_range(plain).map(drop), INVALID_CONTEXT);
            say("cuMemGetAccess", cuda.mem_get_access(base, 0).map(drop), OK);
            say("cuMemRetainAllocationHandle", cuda.mem_retain(base).and_then(|handle| cuda.mem_release(handle)), OK);
            say("properties", cuda.mem_properties(handle).map(drop), OK);
            say("export", cuda.mem_export_fd(handle).map(|fd| drop(own(fd))), OK);
            say("cuMemCreate", cuda.mem_create(CHUNK, 0, POSIX_FD).and_then(|handle| cuda.mem_release(handle)), OK);
            say("cuMemAddressReserve", cuda.mem_reserve(CHUNK).and_then(|base| cuda.mem_address_free(base, CHUNK)), OK);
            let imported = cuda.mem_import_fd(fd.as_raw_fd());
            say("import", imported.map(drop), OK);
            if let Ok(imported) = imported {
                say("cuMemMap", cuda.mem_map(room, CHUNK, 0, imported), OK);
                say("cuMemSetAccess", cuda.mem_set_access(room, CHUNK, 0, READ_WRITE), OK);
                say("cuMemUnmap", cuda.mem_unmap(room, CHUNK), OK);
                say("cuMemRelease", cuda.mem_release(imported), OK);
            }
            say("cuMemGetInfo", cuda.mem_info().map(drop), INVALID_CONTEXT);
            say("cuMemAlloc", cuda.mem_alloc(CHUNK).and_then(|address| cuda.mem_free(address)), INVALID_CONTEXT);
            say("cuMemcpy from VMM memory", cuda.is_filled(base, 0, 16).map(drop), INVALID_CONTEXT);
            say("cuStreamCreate", cuda.stream_create(0).and_then(|stream| cuda.stream_destroy(stream)), INVALID_CONTEXT);
            say("cuEventCreate", cuda.event_create().and_then(|event| cuda.event_destroy(event)), INVALID_CONTEXT);
            say("cuPointerGetAttribute of a foreign pointer", cuda.buffer_id(1 << 40).map(drop), INVALID_VALUE);
            say("cuIpcGetMemHandle", cuda.ipc_get(plain).map(drop), INVALID_CONTEXT);
            say("cuMemPoolCreate", cuda.pool_create(0, POSIX_FD).and_then(|pool| cuda.pool_destroy(pool)), OK);
            say("cuMemFree", cuda.mem_free(plain), OK);
        });
    });
}

#[test]
fn contexts() {
    let Some(_) = Inside::enter_with_any_driver("contexts::contexts") else { return };
    let cuda = Cuda::load();
    let mut facts = Facts::of(cuda);
    facts.code("before cuInit: cuDeviceGetCount", cuda.device_count(), CUresult::CUDA_ERROR_NOT_INITIALIZED);
    facts.code("before cuInit: BUFFER_ID", cuda.buffer_id(1 << 40), CUresult::CUDA_ERROR_NOT_INITIALIZED);
    facts.code("before cuInit: cuMemGetAddressRange", cuda.address_range(1 << 40), CUresult::CUDA_ERROR_NOT_INITIALIZED);
    facts.code("before cuInit: cuDriverGetVersion", cuda.driver_version(), OK);
    cuda.init().expect("cuInit");
    facts.code("cuMemCreate while no context exists", cuda.mem_create(CHUNK, 0, POSIX_FD), OK);
    facts.code("cuPointerGetAttribute while no context exists", cuda.buffer_id(1 << 40), INVALID_VALUE);
    facts.code("cuDevicePrimaryCtxRelease of an inactive one", cuda.primary_release(0), INVALID_CONTEXT);
    let first = cuda.enter_primary(0);
    let chunk = cuda.mem_chunk(CHUNK, 0, POSIX_FD).expect("a chunk");
    let plain = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    facts.code("cuCtxPopCurrent", cuda.ctx_pop(), OK);
    facts.code("cuCtxPopCurrent of an empty stack", cuda.ctx_pop(), INVALID_CONTEXT);
    cuda.ctx_set_current(first).expect("cuCtxSetCurrent");
    facts.code("last cuDevicePrimaryCtxRelease", cuda.primary_release(0), OK);
    facts.code("after it: cuCtxGetCurrent", cuda.ctx_get_current(), OK);
    facts.code("after it: cuMemGetInfo", cuda.mem_info(), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    facts.code("after it: BUFFER_ID of VMM memory", cuda.buffer_id(chunk.1), OK);
    facts.code("after it: BUFFER_ID of cuMemAlloc memory", cuda.buffer_id(plain), INVALID_VALUE);
    facts.code("after it: cuMemRetainAllocationHandle", cuda.mem_retain(chunk.1), OK);
    facts.code("after it: export of the handle", cuda.mem_export_fd(chunk.0).map(own), OK);
    let second = cuda.enter_primary(0);
    facts.known("the primary context has the same handle again", second == first, true);
    facts.code("retained again: BUFFER_ID of VMM memory", cuda.buffer_id(chunk.1), OK);
    facts.code("retained again: copy from VMM memory", cuda.is_filled(chunk.1, 0, 16), OK);
    let own_context = cuda.ctx_create(0).expect("cuCtxCreate");
    facts.code("in another context: copy from VMM memory", cuda.is_filled(chunk.1, 0, 16), OK);
    facts.code("cuCtxDestroy of the current context", cuda.ctx_destroy(own_context), OK);
    facts.known("the context before is current then", cuda.ctx_get_current().map(|context| context == second), Ok(true));
}
