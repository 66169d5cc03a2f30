//! Stream captures, and copies whose memory goes away.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::os::fd::AsRawFd;

use cuda_driver_sys::{CUresult, CUstream};
use cuda_ipc_tests::driver::{Answer, Fake, Inside};

use crate::facts::{Facts, Row, big, own};
use crate::{CHUNK, ILLEGAL_ADDRESS, OK, POSIX_FD, READ_WRITE};

#[test]
fn capture() {
    let Some(_) = Inside::enter_with_any_driver("streams::capture") else { return };
    let (cuda, mut facts) = Facts::start();
    let row = Row::new(cuda, 1, 4);
    let fd = own(cuda.mem_export_fd(row.handles[0]).expect("an export"));
    let context = cuda.ctx_get_current().expect("cuCtxGetCurrent").addr();
    let spare = cuda.mem_create(CHUNK, 0, POSIX_FD).expect("cuMemCreate");
    let (base, room) = (row.base, row.at(2));
    type Call<'a> = (&'static str, Box<dyn Fn() -> Answer + Sync + 'a>, Box<dyn Fn() + 'a>, Box<dyn Fn() + 'a>);
    let nothing = || Box::new(|| ());
    let map = move || {
        cuda.mem_map(room, CHUNK, 0, spare).expect("cuMemMap");
    };
    let unmap = move || {
        let _ = cuda.mem_unmap(room, CHUNK);
    };
    let made = AtomicU64::new(0);
    let alloc = || made.store(cuda.mem_alloc(CHUNK).expect("cuMemAlloc"), Relaxed);
    let reserve = || made.store(cuda.mem_reserve(CHUNK).expect("cuMemAddressReserve"), Relaxed);
    let calls: Vec<Call<'_>> = vec![
        ("cuMemImportFromShareableHandle", Box::new(|| cuda.mem_import_fd(fd.as_raw_fd()).map(drop)), nothing(), nothing()),
        ("cuMemExportToShareableHandle", Box::new(|| cuda.mem_export_fd(spare).map(|fd| drop(own(fd)))), nothing(), nothing()),
        ("cuMemCreate", Box::new(|| cuda.mem_create(CHUNK, 0, POSIX_FD).map(drop)), nothing(), nothing()),
        ("cuMemAddressReserve", Box::new(|| cuda.mem_reserve(CHUNK).map(drop)), nothing(), nothing()),
        ("cuMemMap", Box::new(move || cuda.mem_map(room, CHUNK, 0, spare)), nothing(), Box::new(unmap)),
        ("cuMemSetAccess", Box::new(move || cuda.mem_set_access(room, CHUNK, 0, READ_WRITE)), Box::new(map), Box::new(unmap)),
        ("cuMemUnmap", Box::new(move || cuda.mem_unmap(room, CHUNK)), Box::new(map), Box::new(unmap)),
        ("cuMemRetainAllocationHandle", Box::new(move || cuda.mem_retain(base).map(drop)), nothing(), nothing()),
        (
            "cuMemRelease",
            Box::new(move || cuda.mem_release(spare)),
            Box::new(move || {
                map();
                let _ = cuda.mem_retain(room);
                unmap()
            }),
            nothing(),
        ),
        ("BUFFER_ID", Box::new(move || cuda.buffer_id(base).map(drop)), nothing(), nothing()),
        ("cuMemGetAddressRange", Box::new(move || cuda.address_range(base).map(drop)), nothing(), nothing()),
        ("cuMemGetInfo", Box::new(move || cuda.mem_info().map(drop)), nothing(), nothing()),
        ("cuMemAlloc", Box::new(move || cuda.mem_alloc(CHUNK).map(drop)), nothing(), nothing()),
        ("cuCtxSynchronize", Box::new(move || cuda.ctx_synchronize()), nothing(), nothing()),
        ("cuMemcpyDtoH", Box::new(move || cuda.is_filled(base, 0, 16).map(drop)), nothing(), nothing()),
        ("cuMemcpyHtoD", Box::new(move || cuda.write(base, &[0; 16])), nothing(), nothing()),
        ("cuMemcpyDtoD", Box::new(move || cuda.copy(base, base + 64, 16)), nothing(), nothing()),
        ("cuMemsetD8", Box::new(move || cuda.fill(base, 0, 16)), nothing(), nothing()),
        ("cuMemHostAlloc", Box::new(move || cuda.mem_host_alloc(CHUNK).map(drop)), nothing(), nothing()),
        ("cuMemAllocManaged", Box::new(move || cuda.mem_alloc_managed(CHUNK).map(drop)), nothing(), nothing()),
        ("cuMemFree", Box::new(|| cuda.mem_free(made.load(Relaxed))), Box::new(alloc), nothing()),
        ("cuMemAddressFree", Box::new(|| cuda.mem_address_free(made.load(Relaxed), CHUNK)), Box::new(reserve), nothing()),
        ("cuStreamCreate", Box::new(move || cuda.stream_create(1).map(drop)), nothing(), nothing()),
        ("cuEventCreate", Box::new(move || cuda.event_create().map(drop)), nothing(), nothing()),
    ];
    const MODES: [&str; 3] = ["global", "thread-local", "relaxed"];
    for (name, call, before, after) in &calls {
        for (mode, mode_name) in (0_u32..).zip(MODES) {
            // By another thread with its default mode, by another one that is relaxed, by the capturing thread, by it relaxed.
            let mut seen = Vec::new();
            for (other, relaxed) in [(true, false), (true, true), (false, false), (false, true)] {
                before();
                let stream = cuda.stream_create(1).expect("cuStreamCreate");
                cuda.capture_begin(stream, mode).expect("cuStreamBeginCapture");
                let run = || {
                    if relaxed {
                        cuda.capture_mode(2).expect("relaxed");
                    }
                    let answer = call();
                    if relaxed {
                        cuda.capture_mode(0).expect("global");
                    }
                    answer
                };
                let answer = if other {
                    std::thread::scope(|scope| {
                        let thread = scope.spawn(|| {
                            cuda.ctx_set_current(core::ptr::without_provenance_mut(context)).expect("cuCtxSetCurrent");
                            run()
                        });
                        thread.join().expect("the other thread")
                    })
                } else {
                    run()
                };
                let status = cuda.capture_status(stream).unwrap_or(99);
                let _ = cuda.capture_end(stream).map(|graph| cuda.graph_destroy(graph));
                cuda.stream_destroy(stream).expect("cuStreamDestroy");
                after();
                let code = answer.err().map_or(0, |code| code.0);
                seen.push(format!("{code}{}", ["", "", "!"].get(status as usize).copied().unwrap_or("?")));
            }
            // Codes; `!` where the capture was invalidated.
            let expected = match (*name, mode_name) {
                ("cuCtxSynchronize", _) => ["900!"; 4],
                ("cuMemAlloc" | "cuMemHostAlloc" | "cuMemAllocManaged" | "cuMemFree", "global") => ["900!", "0", "900!", "0"],
                ("cuMemAlloc" | "cuMemHostAlloc" | "cuMemAllocManaged" | "cuMemFree", "thread-local") => ["0", "0", "900!", "0"],
                _ => ["0"; 4],
            };
            let fact = format!("{name} during a {mode_name} capture: other thread, other relaxed, same, same relaxed");
            facts.known(&fact, seen, expected.map(str::to_owned).to_vec());
        }
    }
}

#[test]
fn unmap_under_a_copy() {
    let Some(_) = Inside::enter_with_any_driver("streams::unmap_under_a_copy") else { return };
    let (cuda, mut facts) = Facts::start();
    if let Some(fake) = Fake::find() {
        fake.set_async(None);
    }
    let (from, to) = (cuda.mem_chunk(big(), 0, POSIX_FD).expect("a chunk"), cuda.mem_chunk(big(), 0, POSIX_FD).expect("a chunk"));
    let stream: CUstream = cuda.stream_create(1).expect("cuStreamCreate");
    // Long enough that the unmapping comes in the middle.
    let copies = if Fake::find().is_some() { 1 } else { 2000 };
    for _ in 0..copies {
        cuda.copy_async(to.1, from.1, big(), stream).expect("cuMemcpyDtoDAsync");
    }
    let event = cuda.event_create().expect("cuEventCreate");
    cuda.event_record(event, stream).expect("cuEventRecord");
    let fd = own(cuda.mem_export_fd(to.0).expect("an export"));
    let plain = cuda.mem_alloc(CHUNK).expect("cuMemAlloc");
    let began = std::time::Instant::now();
    facts.code("stream while copies run", cuda.stream_query(stream), CUresult::CUDA_ERROR_NOT_READY);
    facts.code("cuMemUnmap while copies run", cuda.mem_unmap(from.1, big()), OK);
    facts.known("cuMemUnmap waited for the copies", cuda.stream_query(stream) != Err(CUresult::CUDA_ERROR_NOT_READY), false);
    println!("conformance: cuMemUnmap took {:?}", began.elapsed());
    facts.code("cuStreamSynchronize after it", cuda.stream_synchronize(stream), ILLEGAL_ADDRESS);
    facts.code("cuCtxSynchronize after it", cuda.ctx_synchronize(), ILLEGAL_ADDRESS);
    facts.code("a copy after it", cuda.is_filled(to.1, 0, 16), ILLEGAL_ADDRESS);
    // What still works.
    let mut say = |what: &str, answer: Answer, expected| facts.code(&format!("after it: {what}"), answer, expected);
    say("cuStreamQuery", cuda.stream_query(stream), ILLEGAL_ADDRESS);
    say("cuEventQuery", cuda.event_query(event), ILLEGAL_ADDRESS);
    say("cuMemGetInfo", cuda.mem_info().map(drop), ILLEGAL_ADDRESS);
    say("BUFFER_ID", cuda.buffer_id(to.1).map(drop), OK);
    say("cuMemGetAddressRange", cuda.address_range(to.1).map(drop), ILLEGAL_ADDRESS);
    say("cuMemRetainAllocationHandle", cuda.mem_retain(to.1).map(drop), OK);
    say("cuMemCreate", cuda.mem_create(CHUNK, 0, POSIX_FD).map(drop), OK);
    say("cuMemAddressReserve", cuda.mem_reserve(CHUNK).map(drop), OK);
    say("export", cuda.mem_export_fd(to.0).map(|fd| drop(own(fd))), OK);
    say("import", cuda.mem_import_fd(fd.as_raw_fd()).map(drop), OK);
    say("cuMemMap", cuda.mem_map(from.1, big(), 0, from.0), OK);
    say("cuMemSetAccess", cuda.mem_set_access(from.1, big(), 0, READ_WRITE), OK);
    say("cuMemUnmap", cuda.mem_unmap(from.1, big()), OK);
    say("cuMemUnmap of the other one", cuda.mem_unmap(to.1, big()), OK);
    say("cuMemAddressFree", cuda.mem_address_free(to.1, big()), OK);
    say("cuMemRelease", cuda.mem_release(to.0), OK);
    say("cuIpcGetMemHandle", cuda.ipc_get(plain).map(drop), ILLEGAL_ADDRESS);
    say("cuMemAlloc", cuda.mem_alloc(CHUNK).map(drop), ILLEGAL_ADDRESS);
    say("cuMemFree", cuda.mem_free(plain), ILLEGAL_ADDRESS);
    say("cuStreamCreate", cuda.stream_create(1).map(drop), ILLEGAL_ADDRESS);
    say("cuEventCreate", cuda.event_create().map(drop), ILLEGAL_ADDRESS);
    say("cuEventDestroy", cuda.event_destroy(event), ILLEGAL_ADDRESS);
    say("cuStreamDestroy", cuda.stream_destroy(stream), ILLEGAL_ADDRESS);
    say("cuCtxGetCurrent", cuda.ctx_get_current().map(drop), OK);
    say("cuDevicePrimaryCtxRelease", cuda.primary_release(0), OK);
    say("cuDevicePrimaryCtxRetain", cuda.primary_retain(0).map(drop), ILLEGAL_ADDRESS);
    if let Some(fake) = Fake::require("the count of copies into dead mappings") {
        assert_eq!(fake.counters().copies_into_dead_mappings, 1);
    }
}
