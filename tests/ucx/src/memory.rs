//! What players do with memory, in the words of scenarios: make it, share it, move bytes, see whether they are right.

use core::time::Duration;
use std::time::Instant;

use crate::Outcome;
use crate::player::{Answer, Player};

/// Size of the smallest chunk.
pub(crate) const CHUNK: u64 = 2 << 20;
/// Handle types of `cuMemCreate` and pools.
pub(crate) const NO_HANDLE: u32 = 0;
pub(crate) const POSIX_FD: u32 = 1;
pub(crate) const FABRIC: u32 = 8;

/// How long a transfer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Which way bytes move, seen from who asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Get,
    Put,
}

/// How UCX says that it moves them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Route(pub(crate) String);

impl Route {
    /// Whether that is zero-copy by cuda_ipc.
    pub(crate) fn is_lane(&self) -> bool {
        self.0.contains("zero-copy cuda_ipc/")
    }
}

/// A transfer that has begun.
#[derive(Debug)]
pub(crate) struct Transfer {
    request: u64,
    pub(crate) route: Route,
}

/// Registered memory and its packed key.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) memory: u64,
    pub(crate) key: String,
}

/// A peer's memory, opened.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) peer: String,
    pub(crate) address: u64,
    pub(crate) key: u64,
}

/// Local memory for transfers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) memory: u64,
}

impl Player {
    /// `count` chunks of `bytes` at the start of a reservation of `reserved` bytes.
    pub(crate) fn segment(&mut self, bytes: u64, count: u64, reserved: u64, types: u32) -> Outcome<u64> {
        let base = self.reserve(reserved)?;
        self.chunks(base, bytes, count, types)?;
        Ok(base)
    }

    pub(crate) fn reserve(&mut self, bytes: u64) -> Outcome<u64> {
        self.number(&format!("reserve {bytes} 0"))
    }

    pub(crate) fn reserve_at(&mut self, address: u64, bytes: u64) -> Outcome {
        self.number(&format!("reserve {bytes} {address}")).map(|_| ())
    }

    pub(crate) fn unreserve(&mut self, address: u64, bytes: u64) -> Outcome {
        self.ask(&format!("unreserve {address} {bytes}")).map(|_| ())
    }

    pub(crate) fn chunks(&mut self, address: u64, bytes: u64, count: u64, types: u32) -> Outcome {
        self.ask(&format!("chunks {address} {bytes} {count} {types}")).map(|_| ())
    }

    /// Unmaps whole chunks, whose memory is freed by that.
    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Outcome {
        self.ask(&format!("unmap {address} {bytes}")).map(|_| ())
    }

    /// Memory of `cuMemAlloc`.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Outcome<u64> {
        self.number(&format!("alloc {bytes}"))
    }

    /// A pool of these handle types, and an allocation from it: its address, and the pool.
    pub(crate) fn pool(&mut self, bytes: u64, types: u32) -> Outcome<(u64, u64)> {
        match self.numbers(&format!("pool {bytes} {types}"))?.as_slice() {
            [address, pool] => Ok((*address, *pool)),
            _ => Err("no pool".to_owned()),
        }
    }

    /// Another allocation from a pool.
    pub(crate) fn pool_more(&mut self, bytes: u64, pool: u64) -> Outcome<u64> {
        self.number(&format!("pool_more {bytes} {pool}"))
    }

    /// Frees an allocation of a pool, by a stream or at once.
    pub(crate) fn pool_free(&mut self, address: u64, by_stream: bool) -> Outcome {
        let word = if by_stream { "free_async" } else { "free" };
        self.ask(&format!("{word} {address}")).map(|_| ())
    }

    /// Writes the pattern of `seed`, from its byte `first` on.
    pub(crate) fn fill(&mut self, address: u64, len: u64, seed: u64, first: u64) -> Outcome {
        self.ask(&format!("fill {address} {len} {seed} {first}")).map(|_| ())
    }

    /// An error unless the pattern is there.
    pub(crate) fn check(&mut self, address: u64, len: u64, seed: u64, first: u64) -> Outcome {
        match self.numbers(&format!("check {address} {len} {seed} {first}"))?.as_slice() {
            [0, _] => Ok(()),
            [wrong, at] => Err(format!("{}: {wrong} of {len} bytes are wrong, the first at {at}", self.name)),
            _ => Err("no numbers".to_owned()),
        }
    }

    /// Registers memory, of which UCX finds out the type, and packs its key.
    pub(crate) fn share(&mut self, address: u64, len: u64) -> Outcome<Shared> {
        self.share_as(address, len, false)
    }

    /// As [`Player::share`], telling UCX that it is CUDA memory if `typed`.
    pub(crate) fn share_as(&mut self, address: u64, len: u64, typed: bool) -> Outcome<Shared> {
        let memory = self.number(&format!("register {address} {len} {}", u8::from(typed)))?;
        let key = self.ask(&format!("pack {memory}"))?;
        Ok(Shared { address, len, memory, key })
    }

    pub(crate) fn deregister(&mut self, memory: u64) -> Outcome {
        self.ask(&format!("deregister {memory:#x}")).map(|_| ())
    }

    /// Registered memory of `cuMemAlloc` for transfers to land in and start from.
    pub(crate) fn buffer(&mut self, len: u64) -> Outcome<Local> {
        let address = self.alloc(len)?;
        self.local(address, len)
    }

    /// Registers memory for transfers to land in and start from.
    pub(crate) fn local(&mut self, address: u64, len: u64) -> Outcome<Local> {
        let memory = self.number(&format!("register {address} {len} 1"))?;
        Ok(Local { address, len, memory })
    }

    /// Opens what a peer has shared.
    pub(crate) fn open(&mut self, peer: &Player, shared: &Shared) -> Outcome<Remote> {
        self.open_at(&peer.name, shared)
    }

    /// As [`Player::open`], by the peer's name.
    pub(crate) fn open_at(&mut self, peer: &str, shared: &Shared) -> Outcome<Remote> {
        let endpoint = self.endpoint(peer)?;
        let key = self.number(&format!("unpack {endpoint:#x} {}", shared.key))?;
        Ok(Remote { peer: peer.to_owned(), address: shared.address, key })
    }

    /// Gives an opened key back.
    pub(crate) fn drop_key(&mut self, remote: Remote) -> Outcome {
        self.ask(&format!("drop {:#x}", remote.key)).map(|_| ())
    }

    /// Reads a part of what a peer has shared, and checks it: right bytes of `seed` by the lane.
    pub(crate) fn read(&mut self, remote: &Remote, at: u64, local: Local, len: u64, seed: u64, first: u64) -> Outcome {
        self.fill(local.address, len, !seed, 0)?;
        let route = self.transfer(Way::Get, remote, at, local, len)?;
        self.check(local.address, len, seed, first)?;
        if route.is_lane() { Ok(()) } else { Err(format!("{}: read by `{}`", self.name, route.0)) }
    }

    /// Begins to move `len` bytes between `remote.address + at` and the start of `local`.
    pub(crate) fn begin(&mut self, way: Way, remote: &Remote, at: u64, local: Local, len: u64) -> Outcome<Transfer> {
        match self.try_begin(way, remote, at, local, len)? {
            Ok(transfer) => Ok(transfer),
            Err(text) => Err(format!("{}: {way:?} was refused: {text}", self.name)),
        }
    }

    /// As [`Player::begin`]; the inner error is what UCX said.
    pub(crate) fn try_begin(&mut self, way: Way, remote: &Remote, at: u64, local: Local, len: u64) -> Outcome<Result<Transfer, String>> {
        let endpoint = self.endpoint(&remote.peer)?;
        let word = match way {
            Way::Get => "get",
            Way::Put => "put",
        };
        let command =
            format!("{word} {endpoint:#x} {:#x} {:#x} {:#x} {len} {:#x}", remote.key, remote.address + at, local.address, local.memory);
        Ok(match self.try_ask(&command)? {
            Answer::Refused(_, text) => Err(text),
            Answer::Ok(values) => {
                let (request, route) = values.split_once(' ').unwrap_or((&values, ""));
                let request = crate::player::parse(request).ok_or("no request")?;
                Ok(Transfer { request, route: Route(route.to_owned()) })
            }
        })
    }

    /// Waits for the end of a transfer; the inner error is what UCX said.
    pub(crate) fn try_finish(&mut self, transfer: &Transfer) -> Outcome<Result<(), String>> {
        Ok(match self.try_ask(&format!("wait {:#x} {}", transfer.request, PATIENCE.as_millis()))? {
            Answer::Ok(_) => Ok(()),
            Answer::Refused(_, text) => Err(text),
        })
    }

    pub(crate) fn finish(&mut self, transfer: &Transfer) -> Outcome {
        self.try_finish(transfer)?.map_err(|text| format!("{}: a transfer failed: {text}", self.name))
    }

    /// Moves bytes and waits until they are there.
    pub(crate) fn transfer(&mut self, way: Way, remote: &Remote, at: u64, local: Local, len: u64) -> Outcome<Route> {
        let transfer = self.begin(way, remote, at, local, len)?;
        self.finish(&transfer)?;
        if way == Way::Put {
            self.flush(&remote.peer)?;
        }
        Ok(transfer.route)
    }

    /// As [`Player::transfer`] for what may fail at any point: the inner error is what UCX said.
    pub(crate) fn try_transfer(&mut self, way: Way, remote: &Remote, at: u64, local: Local, len: u64) -> Outcome<Result<Route, String>> {
        Ok(match self.try_begin(way, remote, at, local, len)? {
            Err(text) => Err(text),
            Ok(transfer) => self.try_finish(&transfer)?.map(|()| transfer.route),
        })
    }

    /// An error if memory that is gone can be used. By writing where UCX ends the process when a read fails, which is so before 1.19.
    pub(crate) fn finds_it_gone(&mut self, remote: &Remote, at: u64, local: Local, len: u64) -> Outcome {
        let way = if self.survives_failed_reads { Way::Get } else { Way::Put };
        match self.try_transfer(way, remote, at, local, len)? {
            Ok(route) => Err(format!("{}: {way:?} of memory that is gone, at {at}, went by `{}`", self.name, route.0)),
            Err(_) => Ok(()),
        }
    }

    /// Waits until everything written to a peer has arrived.
    pub(crate) fn flush(&mut self, peer: &str) -> Outcome {
        let endpoint = self.endpoint(peer)?;
        self.ask(&format!("flush {endpoint:#x} {}", PATIENCE.as_millis())).map(|_| ())
    }

    fn endpoint(&self, peer: &str) -> Outcome<u64> {
        self.endpoints.get(peer).copied().ok_or_else(|| format!("{} is not connected to {peer}", self.name))
    }
}

/// What a process has and has done, from the fake driver.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reserved_bytes: u64,
    pub(crate) exports: u64,
    pub(crate) imports: u64,
    pub(crate) calls_after_fork: u64,
    pub(crate) dead_copies: u64,
    pub(crate) internal_errors: u64,
}

impl Player {
    pub(crate) fn counters(&mut self) -> Outcome<Counters> {
        let numbers = self.numbers("counters")?;
        let number = |at: usize| numbers.get(at).copied().unwrap_or(0);
        Ok(Counters {
            reserved_bytes: number(4),
            exports: number(5),
            imports: number(6),
            calls_after_fork: number(8),
            dead_copies: number(11),
            internal_errors: number(12),
        })
    }

    /// Bytes of a device that are in use by anybody.
    pub(crate) fn used_bytes(&mut self, device: u32) -> Outcome<u64> {
        self.numbers(&format!("device {device}"))?.get(1).copied().ok_or_else(|| "no number".to_owned())
    }

    /// Waits until no more than `bytes` of a device are in use: after how many milliseconds that was, or `None` if not within the limit.
    pub(crate) fn wait_for_used(&mut self, device: u32, bytes: u64, limit_ms: u64) -> Outcome<Option<u64>> {
        let start = Instant::now();
        loop {
            let used = self.used_bytes(device)?;
            let passed = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
            if used <= bytes {
                return Ok(Some(passed));
            }
            if passed > limit_ms {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Open fds.
    pub(crate) fn fds(&self) -> Outcome<usize> {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map(Iterator::count).map_err(|error| format!("{}: {error}", self.name))
    }

    /// Resident memory that is not shared: the fake driver's device memory is a shared file.
    pub(crate) fn resident_kib(&self) -> Outcome<u64> {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).ok_or_else(|| format!("{path} has no RssAnon"))
    }

    /// How often this process has called a driver function.
    pub(crate) fn calls(&mut self, name: &str) -> Outcome<u64> {
        self.number(&format!("calls {name}"))
    }

    /// Copies that UCX has given to the driver for the lane.
    pub(crate) fn lane_copies(&mut self) -> Outcome<u64> {
        self.calls("cuMemcpyDtoDAsync_v2")
    }

    /// An error if the driver has seen anything that must never happen.
    pub(crate) fn is_clean(&mut self) -> Outcome {
        let counters = self.counters()?;
        if counters.dead_copies == 0 && counters.internal_errors == 0 && counters.calls_after_fork == 0 {
            return Ok(());
        }
        Err(format!("{}: the driver has seen what must not be: {counters:?}", self.name))
    }
}
