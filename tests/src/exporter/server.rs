//! The exporter process: does what it is asked, one line at a time.

mod fds;
mod others;

use core::time::Duration;
use std::os::unix::process::CommandExt;
use std::process::Command;

use cuda_ipc_core::exporter::{Export, Exporter, ExporterOptions};
use cuda_ipc_core::sys::driver;

use crate::driver::{Cuda, Fake, Inside};
use crate::memory::Memory;
use crate::snapshot;

type Answer = Result<String, String>;

/// Serves until the other end is gone.
pub fn serve(me: &Inside) {
    let cuda = Cuda::start();
    cuda.enter_primary(0);
    let core = driver::Cuda::open().expect("a driver");
    let mut server = Server {
        cuda,
        core,
        fake: Fake::find().expect("the fake driver"),
        exporter: None,
        memories: Vec::new(),
        exports: Vec::new(),
        placed: Vec::new(),
        pools: Vec::new(),
    };
    me.tell("ready");
    while let Some(request) = me.listen() {
        let words: Vec<&str> = request.split(' ').collect();
        let (&what, arguments) = words.split_first().expect("a word");
        let numbers: Vec<u64> = arguments.iter().filter_map(|word| word.parse().ok()).collect();
        match server.answer(what, arguments, &numbers) {
            Ok(answer) => me.tell(&format!("ok {answer}")),
            Err(error) => me.tell(&format!("err {error}")),
        }
    }
}

struct Server {
    cuda: Cuda,
    core: driver::Cuda,
    fake: Fake,
    exporter: Option<Exporter>,
    memories: Vec<Option<Memory>>,
    exports: Vec<Option<Export>>,
    /// Numbers under which files were put that nobody owns.
    placed: Vec<i32>,
    /// Addresses of the driver's pools.
    pools: Vec<Option<usize>>,
}

impl Server {
    fn answer(&mut self, what: &str, words: &[&str], numbers: &[u64]) -> Answer {
        match (what, numbers) {
            // memory
            ("reserve", &[len, wish]) => {
                let memory = Memory::reserve(self.cuda, len, wish).map_err(text)?;
                let base = memory.base();
                self.memories.push(Some(memory));
                Ok(format!("{} {base}", self.memories.len() - 1))
            }
            ("mark", &[memory, offset, len, seed]) => done(self.memory(memory)?.mark(offset, len, seed)),
            ("map", &[memory, offset, len, seed]) => done(self.memory(memory)?.map(offset, len, seed)),
            ("check", &[memory, offset, len, seed]) => {
                let address = self.memory(memory)?.base() + offset;
                done(crate::pattern::check(&self.cuda, address, 0, len, seed))
            }
            ("map_types", &[memory, offset, len, types]) => {
                let types = u32::try_from(types).map_err(text)?;
                done(self.memory(memory)?.map_types(offset, len, types))
            }
            ("map_device", &[memory, offset, len, device]) => {
                let device = i32::try_from(device).map_err(text)?;
                done(self.memory(memory)?.map_on(device, offset, len, crate::memory::POSIX_FD))
            }
            ("unmap", &[memory, offset]) => done(self.memory(memory)?.unmap(offset)),
            ("unreserve", &[memory]) => {
                self.memories[at(memory)] = None;
                done(Ok::<_, &str>(()))
            }
            ("allocate", _) => self.allocate(words[0]),
            ("free", []) => self.cuda.mem_info().map(|(free, _)| free.to_string()).map_err(text),

            // the exporter
            ("exporter", [reserve, sweep @ ..]) => {
                let mut options = without_broker();
                options.fd_reserve = *reserve;
                options.sweep_interval = sweep.first().map(|&ms| Duration::from_millis(ms));
                self.exports.clear();
                self.exporter = Some(Exporter::new(self.core, options).map_err(text)?);
                done(Ok::<_, &str>(()))
            }
            ("exporter_with", _) => {
                self.exports.clear();
                self.exporter = Some(Exporter::new(self.core, with_broker(words)?).map_err(text)?);
                done(Ok::<_, &str>(()))
            }
            ("nonce", []) => Ok(self.exporter()?.nonce().0.to_string()),
            ("broker_failures", []) => Ok(format!("{:?}", self.exporter()?.broker_failures())),
            ("no_exporter", []) => {
                self.exports.clear();
                self.exporter = None;
                done(Ok::<_, &str>(()))
            }
            // A new exporter, and no fd of an application's left.
            ("renew", []) => {
                self.exports.clear();
                self.exporter = None;
                self.close_placed()?;
                done(self.exporter().map(drop))
            }
            ("export", &[memory, offset, len]) => {
                let address = self.memory(memory)?.base() + offset;
                self.export(address, len)
            }
            ("export_at", &[address, len]) => self.export(address, len),
            ("release", &[export]) => {
                self.exports[at(export)] = None;
                done(Ok::<_, &str>(()))
            }
            ("release_all", []) => {
                self.exports.iter_mut().for_each(|export| *export = None);
                done(Ok::<_, &str>(()))
            }
            ("retire", &[memory, offset, len]) => {
                let address = self.memory(memory)?.base() + offset;
                Ok(self.exporter()?.retire(address, len).to_string())
            }
            ("sweep", []) => Ok(self.exporter()?.sweep().to_string()),
            ("stats", []) => {
                let stats = self.exporter()?.stats();
                Ok(format!("{} {} {} {} {}", stats.chunks, stats.fds, stats.published, stats.retired, stats.swept))
            }

            // the process
            ("snapshot", []) => Ok(format!("{:?}", snapshot::Snapshot::take(&self.fake))),
            ("lose_first_thread", []) => done(lose_first_thread()),
            ("fork", []) => fork_a_sleeper(),
            ("dumpable", &[whether]) => done(crate::apart::dumpable(whether != 0)),
            ("pid", []) => Ok(std::process::id().to_string()),
            ("calls", []) => Ok(self.fake.calls(words[0]).to_string()),
            ("fault", _) => {
                self.fake.add_fault(words[0]);
                done(Ok::<_, &str>(()))
            }
            ("arm", &[at, before, errno]) => {
                crate::shim::arm(at, before, i32::try_from(errno).map_err(text)?);
                done(Ok::<_, &str>(()))
            }
            ("disarm", []) => {
                let (calls, failed) = crate::shim::disarm();
                Ok(format!("{calls} {}", failed.unwrap_or("nothing")))
            }
            ("fds", []) => Ok(snapshot::open_fds().len().to_string()),
            ("limit", &[soft]) => {
                use nix::sys::resource::{Resource, getrlimit, setrlimit};
                let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(text)?;
                done(setrlimit(Resource::RLIMIT_NOFILE, soft, hard))
            }
            ("exec", []) => {
                let program = std::env::current_exe().map_err(text)?;
                Err(Command::new(program).args(std::env::args_os().skip(1)).exec().to_string())
            }
            _ => self.answer_about_others(what, words, numbers),
        }
    }

    fn export(&mut self, address: u64, len: u64) -> Answer {
        let export = self.exporter()?.export(address, len).map_err(|refused| format!("{:?}", refused.cause))?;
        let rkey: String = export.rkey().encode().iter().map(|byte| format!("{byte:02x}")).collect();
        self.exports.push(Some(export));
        Ok(format!("{} {rkey}", self.exports.len() - 1))
    }

    /// The exporter; made with default options, but without threads, where none was asked for.
    fn exporter(&mut self) -> Result<&Exporter, String> {
        if self.exporter.is_none() {
            let mut options = without_broker();
            options.sweep_interval = None;
            self.exporter = Some(Exporter::new(self.core, options).map_err(text)?);
        }
        self.exporter.as_ref().ok_or_else(|| "no exporter".to_owned())
    }

    fn memory(&mut self, index: u64) -> Result<&mut Memory, String> {
        self.memories.get_mut(at(index)).and_then(Option::as_mut).ok_or_else(|| format!("no memory {index}"))
    }

    /// Memory that is not VMM memory of POSIX fds: its address.
    fn allocate(&mut self, kind: &str) -> Answer {
        const LEN: usize = 4 << 20;
        let address = match kind {
            "plain" => self.cuda.mem_alloc(LEN),
            "managed" => self.cuda.mem_alloc_managed(LEN),
            "pinned" => self.cuda.mem_host_alloc(LEN).map(|address| address.addr() as u64),
            "default_pool" => self.cuda.alloc_async(LEN, core::ptr::null_mut()),
            "pool" | "posix_pool" => {
                let pool = self.cuda.pool_create(0, u32::from(kind == "posix_pool")).map_err(text)?;
                self.cuda.alloc_from_pool(LEN, pool, core::ptr::null_mut())
            }
            "host" => Ok(Box::leak(vec![0_u8; LEN].into_boxed_slice()).as_ptr().addr() as u64),
            _ => return Err(format!("no kind {kind}")),
        };
        address.map(|address| address.to_string()).map_err(text)
    }
}

/// Options for tests that count calls, threads and fds, and that ask what happens where fds can only be fetched.
pub fn without_broker() -> ExporterOptions {
    let mut options = ExporterOptions::default();
    options.broker = false;
    options
}

/// Default options but for what `words` say: `reserve=N`, `sweep=MS`, `dir=PATH`, `mode=OCTAL`, `uids=N,N`.
fn with_broker(words: &[&str]) -> Result<ExporterOptions, String> {
    let mut options = ExporterOptions::default();
    for word in words {
        match word.split_once('=').ok_or("a word without =")? {
            ("reserve", value) => options.fd_reserve = value.parse().map_err(text)?,
            ("sweep", value) => options.sweep_interval = Some(Duration::from_millis(value.parse().map_err(text)?)),
            ("dir", value) => options.socket_dir = Some(value.into()),
            ("mode", value) => options.socket_dir_mode = u32::from_str_radix(value, 8).map_err(text)?,
            ("uids", value) => options.allowed_uids = value.split(',').map(str::parse).collect::<Result<_, _>>().map_err(text)?,
            (other, _) => return Err(format!("no option {other}")),
        }
    }
    Ok(options)
}

/// A child that never execs and waits for its end; its pid.
fn fork_a_sleeper() -> Answer {
    let child = crate::child::fork(|| {
        std::thread::sleep(Duration::from_secs(20));
        true
    });
    Ok(child.to_string())
}

/// Ends this process's first thread, and only that one.
fn lose_first_thread() -> std::io::Result<()> {
    extern "C" fn end_thread(_signal: i32) {
        // SAFETY: exit(2) of the calling thread; nothing of the process is touched.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let handler: extern "C" fn(i32) = end_thread;
    // SAFETY: a handler that only makes a system call.
    unsafe { libc::signal(libc::SIGUSR2, handler as libc::sighandler_t) };
    let pid = i64::from(std::process::id());
    // SAFETY: a signal to a thread of this process that has a handler.
    if unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, libc::SIGUSR2) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let gone = || pidfd_sys::process_stat(std::process::id()).is_ok_and(|stat| stat.state == b'Z');
    if snapshot::wait_until(Duration::from_secs(5), gone) { Ok(()) } else { Err(std::io::ErrorKind::TimedOut.into()) }
}

fn text(error: impl core::fmt::Debug) -> String {
    format!("{error:?}")
}

fn done<E: core::fmt::Debug>(result: Result<(), E>) -> Answer {
    result.map(|()| String::new()).map_err(text)
}

fn at(index: u64) -> usize {
    usize::try_from(index).expect("an index")
}
