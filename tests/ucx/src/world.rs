//! One fake machine with UCX processes on it: made for one scenario, gone with it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use core::time::Duration;

use crate::Outcome;
use crate::player::{Answer, Player, Setup};
use crate::wheel::Wheel;

/// Where the things under test are.
#[derive(Clone, Debug)]
pub(crate) struct Built {
    /// Folder with the fake driver under the names that programs open.
    pub(crate) driver: PathBuf,
    /// The preload library.
    pub(crate) preload: PathBuf,
    /// The `cuda-ipc` program.
    pub(crate) command: PathBuf,
}

/// See the module's documentation.
pub(crate) struct World {
    pub(crate) wheel: Wheel,
    pub(crate) built: Built,
    folder: PathBuf,
    /// Variables for every process.
    env: Vec<(&'static str, String)>,
    transcript: Arc<Mutex<String>>,
    logs: Vec<PathBuf>,
    /// All releases of this run.
    all: Vec<Wheel>,
    /// How long a scenario that only wants time may take.
    pub(crate) soak: Duration,
    /// What a scenario wants to be read besides "passed".
    pub(crate) notes: Vec<String>,
}

impl World {
    pub(crate) fn new(wheel: &Wheel, all: &[Wheel], built: &Built, soak: Duration) -> Outcome<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let shm = Path::new("/dev/shm");
        let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let folder = parent.join(format!("ucx-tests-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        std::fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self {
            wheel: wheel.clone(),
            built: built.clone(),
            folder,
            env: Vec::new(),
            transcript: Arc::default(),
            logs: Vec::new(),
            all: all.to_vec(),
            soak,
            notes: Vec::new(),
        })
    }

    /// A variable for every process that is started from now on.
    pub(crate) fn set(&mut self, name: &'static str, value: &str) {
        self.env.push((name, value.to_owned()));
    }

    /// The other releases of this run.
    pub(crate) fn others(&self) -> Vec<Wheel> {
        self.all.iter().filter(|wheel| wheel.name != self.wheel.name).cloned().collect()
    }

    /// Starts players and opens UCX in each, all at once.
    pub(crate) fn players<const N: usize>(&mut self, wanted: [(&str, Setup); N]) -> Outcome<[Player; N]> {
        let mut players = Vec::with_capacity(N);
        for (name, setup) in &wanted {
            players.push(self.start(name, setup)?);
        }
        for player in &mut players {
            let command = format!("open {}", player.device);
            player.send(&command)?;
        }
        for player in &mut players {
            if let Answer::Refused(code, text) = player.receive(Duration::from_secs(60))? {
                return Err(format!("{}: cannot open UCX: {text} ({code})", player.name));
            }
        }
        players.try_into().map_err(|_| "not so many players".to_owned())
    }

    /// Two players, `a` and `b`, connected both ways.
    pub(crate) fn pair(&mut self, a: Setup, b: Setup) -> Outcome<(Player, Player)> {
        let [mut a, mut b] = self.players([("a", a), ("b", b)])?;
        connect(&mut a, &mut b)?;
        Ok((a, b))
    }

    /// Starts a player that opens nothing.
    pub(crate) fn start(&mut self, name: &str, setup: &Setup) -> Outcome<Player> {
        let program = setup.wheel.as_ref().unwrap_or(&self.wheel).program();
        let mut command = if setup.namespace {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
            if setup.second {
                // A shell that has something to do afterwards starts a process.
                command.args(["sh", "-c", "\"$0\"; exit $?"]);
            }
            command.arg(program);
            command
        } else if setup.by_command {
            let mut command = Command::new(&self.built.command);
            command.args(["run", "--explain", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        self.environment(&mut command, setup);
        let log = self.folder.join(format!("{name}.log"));
        self.logs.push(log.clone());
        let mut player = Player::start(name, command, setup, log, self.transcript.clone())?;
        player.survives_failed_reads = setup.wheel.as_ref().unwrap_or(&self.wheel).is_at_least("1.19");
        Ok(player)
    }

    /// A path for a file that is removed with the machine.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The variables of a process of this machine.
    pub(crate) fn environment(&self, command: &mut Command, setup: &Setup) {
        let wheel = setup.wheel.as_ref().unwrap_or(&self.wheel);
        let mut search = OsString::from(&self.built.driver);
        for folder in wheel.search_path() {
            search.push(":");
            search.push(folder);
        }
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_ours(&name.to_string_lossy())) {
            command.env_remove(name);
        }
        command.env("LD_LIBRARY_PATH", search).env("FAKE_CUDA_DIR", &self.folder);
        command.env("UCX_TLS", "cuda_ipc,cuda_copy,sm,self").env("UCX_LOG_FILE", "stderr").env("UCX_PROTO_INFO", "y");
        if !setup.by_command {
            // Without it UCX reads by this lane only where there is an NVLink.
            command.env("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y");
        }
        if !setup.hooks {
            // What UCX remembers of memory is right only if the hooks tell it what is new, so it does without where they cannot be set, as is done here.
            command.env("UCX_MEM_CUDA_HOOK_MODE", "none").env("UCX_MEMTYPE_CACHE", "n").env("UCX_RCACHE_ENABLE", "n");
        }
        // A UCX that has the lane needs no library for it, and is told where it is not wanted.
        match (setup.preload, wheel.has_lane) {
            (true, true) | (false, false) => {}
            (true, false) => {
                command.env("LD_PRELOAD", &self.built.preload);
            }
            (false, true) => {
                command.env("UCX_CUDA_IPC_POSIX_FD", "n");
            }
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
    }

    /// What has been said and logged: for a report of a failure.
    pub(crate) fn evidence(&self) -> String {
        let mut text = tail(&self.transcript.lock().unwrap_or_else(PoisonError::into_inner), 60);
        for log in &self.logs {
            let name = log.file_stem().unwrap_or_default().to_string_lossy();
            text += &format!("--- {name} logged:\n{}", tail(&std::fs::read_to_string(log).unwrap_or_default(), 30));
        }
        text
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Connects two players both ways, so that each can read and write the other's memory.
pub(crate) fn connect(a: &mut Player, b: &mut Player) -> Outcome {
    let (to_a, to_b) = (a.ask("address")?, b.ask("address")?);
    let there = a.number(&format!("connect {to_b} 0"))?;
    let back = b.number(&format!("connect {to_a} 0"))?;
    a.endpoints.insert(b.name.clone(), there);
    b.endpoints.insert(a.name.clone(), back);
    Ok(())
}

/// Variables that would change what is tested.
fn is_ours(name: &str) -> bool {
    ["UCX_", "FAKE_", "CUDA_", "LD_PRELOAD"].iter().any(|start| name.starts_with(start))
}

fn tail(text: &str, count: usize) -> String {
    // UCX says this for every registration, about a function that the fake driver does not have.
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains("sync_memops")).collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|line| format!("{line}\n")).collect()
}
