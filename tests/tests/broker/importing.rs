//! An importer in a process of its own, at a test's command.

use core::time::Duration;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use cuda_ipc_core::diagnosis::Diagnosis;
use cuda_ipc_core::importer::{ConnectOptions, Deadline, Import, ImportError, Peer, Witness};
use cuda_ipc_core::key::Key;
use cuda_ipc_core::rkey::Rkey;
use cuda_ipc_tests::apart;
use cuda_ipc_tests::driver::{self, Inside};
use cuda_ipc_tests::exporter::RemoteMemory;
use cuda_ipc_tests::importer::{Importer, LONG, key};
use cuda_ipc_tests::snapshot::{Snapshot, open_fds};

pub(crate) const ROLE: &str = "importer";

/// A process that imports. Killed when dropped.
pub(crate) struct Importing {
    process: driver::Peer,
}

impl Importing {
    pub(crate) fn start(me: &Inside) -> Self {
        Self::start_with(me, |_| {})
    }

    pub(crate) fn start_with(me: &Inside, change: impl FnOnce(&mut Command)) -> Self {
        let mut process = me.spawn_with(ROLE, change).expect("an importer process");
        assert_eq!(process.listen(), "ready");
        Self { process }
    }

    /// Asks for something, without waiting for the answer.
    pub(crate) fn tell(&mut self, request: &str) {
        self.process.tell(request);
    }

    pub(crate) fn answer(&mut self) -> Result<String, String> {
        let answer = self.process.listen();
        match answer.split_once(' ').unwrap_or((&answer, "")) {
            ("ok", rest) => Ok(rest.to_owned()),
            (_, rest) => Err(rest.to_owned()),
        }
    }

    pub(crate) fn ask(&mut self, request: &str) -> Result<String, String> {
        self.tell(request);
        self.answer()
    }

    pub(crate) fn tell_to_connect(&mut self, rkey: &Rkey, options: &str) {
        self.tell(format!("connect {} {options}", hex(rkey)).trim_end());
    }

    /// Reaches an exporter: by which route, or the error.
    pub(crate) fn connect(&mut self, rkey: &Rkey, options: &str) -> Result<String, String> {
        self.tell_to_connect(rkey, options);
        self.answer()
    }

    /// Reaches an exporter, imports all and compares every byte; by which route.
    pub(crate) fn verify(&mut self, rkey: &Rkey, memory: &RemoteMemory, options: &str) -> Result<String, String> {
        let route = self.connect(rkey, options)?;
        self.import(rkey, memory)?;
        Ok(route)
    }

    /// Imports all from the exporter that was reached, and compares every byte.
    pub(crate) fn import(&mut self, rkey: &Rkey, memory: &RemoteMemory) -> Result<String, String> {
        self.ask(&import_of(rkey, memory))
    }

    pub(crate) fn finish(self) {
        self.process.finish();
    }

    pub(crate) fn kill(self) {
        self.process.kill().unwrap();
    }
}

pub(crate) fn import_of(rkey: &Rkey, memory: &RemoteMemory) -> String {
    let chunks: Vec<String> = memory.chunks.iter().map(|(offset, (len, seed))| format!("{offset}:{len}:{seed}")).collect();
    format!("import {} {} {} {}", hex(rkey), memory.base, memory.len, chunks.join(","))
}

/// Words to options: `route=NAME`, `dir=PATH`, `uids=N,N`.
fn options(words: &[&str]) -> ConnectOptions {
    let mut options = ConnectOptions::default();
    for word in words {
        match word.split_once('=').expect("a word with =") {
            ("route", name) => options.route = name.parse().unwrap(),
            ("dir", path) => options.socket_dir = Some(path.into()),
            ("uids", list) => options.allowed_uids = list.split(',').map(|uid| uid.parse().unwrap()).collect(),
            ("deadline" | "scope" | "gpu", _) => {}
            (other, _) => panic!("no option {other}"),
        }
    }
    options
}

fn deadline(words: &[&str]) -> Deadline {
    let ms = words.iter().find_map(|word| word.strip_prefix("deadline="));
    Deadline::after(ms.map_or(LONG, |ms| Duration::from_millis(ms.parse().unwrap())))
}

/// Serves until the other end is gone.
pub(crate) fn serve(me: &Inside) {
    let importer = Importer::start();
    let (mut peer, mut kept): (Option<Arc<Peer>>, Vec<Import>) = (None, Vec::new());
    let mut filling = Vec::new();
    me.tell("ready");
    while let Some(request) = me.listen() {
        let words: Vec<&str> = request.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let answer = match words[0] {
            "refuse" => {
                apart::refuse(words[1].parse().unwrap(), words[2].parse().unwrap());
                Ok(String::new())
            }
            "connect" => match Peer::connect_with(&read_key(words[1]), &options(&words[2..]), deadline(&words[2..])) {
                Ok(reached) => {
                    let route = reached.route().to_string();
                    peer = Some(Arc::new(reached));
                    Ok(route)
                }
                Err(error) => Err(text(&error)),
            },
            "explain" => match Peer::connect_with(&read_key(words[1]), &options(&words[2..]), deadline(&words[2..])) {
                Ok(reached) => Err(format!("reached by {}", reached.route())),
                Err(error) => explained(&error, &read_key(words[1]), &words[2..]),
            },
            "explain_import" => {
                let rkey = read_rkey(words[1]);
                let key = key(&rkey);
                match Peer::connect_with(&key, &options(&words[2..]), deadline(&words[2..])) {
                    Ok(reached) => match importer.import_from(&Arc::new(reached), &rkey) {
                        Ok(_) => Err("imported".to_owned()),
                        Err(error) => explained(&error, &key, &words[2..]),
                    },
                    Err(error) => Err(text(&error)),
                }
            }
            "try" => match Witness::default().try_process(words[1].parse().unwrap()) {
                Ok(()) => Ok("open".to_owned()),
                Err(diagnosis) => Ok(said(&diagnosis)),
            },
            "refuse_fds" => {
                apart::refuse_fds(libc::EPERM);
                Ok(String::new())
            }
            "fill" => {
                // Until no number is left.
                while let Ok(file) = std::fs::File::open("/dev/null") {
                    filling.push(file);
                }
                Ok(filling.len().to_string())
            }
            "import" | "hold" => {
                let before = Snapshot::take(&importer.fake);
                let (rkey, memory) = (read_rkey(words[1]), memory(&words[2..]));
                let imported = importer.import_from(peer.as_ref().unwrap(), &rkey).map_err(|error| text(&error)).and_then(|import| {
                    memory.spot_check(&importer.cuda, import.address(), rkey.base - memory.base, rkey.len)?;
                    Ok(import)
                });
                match imported {
                    Ok(import) if words[0] == "hold" => {
                        kept.push(import);
                        Ok(String::new())
                    }
                    Ok(import) => import.close().map(|()| String::new()).map_err(|error| error.to_string()),
                    Err(error) => {
                        before.assert_unchanged(&importer.fake, "an import that failed");
                        Err(error)
                    }
                }
            }
            "gone" => peer.as_ref().map(|peer| format!("{} {}", peer.has_exited(), peer.is_gone())).ok_or_else(String::new),
            "current" => Ok(kept.iter().all(Import::is_current).to_string()),
            "drop" => {
                (peer, kept) = (None, Vec::new());
                Ok(String::new())
            }
            "fds" => Ok(open_fds().len().to_string()),
            "limit" => {
                use nix::sys::resource::{Resource, getrlimit, setrlimit};
                let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
                setrlimit(Resource::RLIMIT_NOFILE, number(1), hard).map(|()| String::new()).map_err(|error| error.to_string())
            }
            _ => Err(format!("not understood: {request}")),
        };
        match answer {
            Ok(answer) => me.tell(&format!("ok {answer}")),
            Err(error) => me.tell(&format!("err {error}")),
        }
    }
}

/// What the witness says of an error.
fn explained(error: &ImportError, key: &Key, words: &[&str]) -> Result<String, String> {
    let word = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
    let mut witness = Witness::default();
    if let Some(file) = word("scope=") {
        witness = witness.with_ptrace_scope(file);
    }
    if let Some(visible) = word("gpu=") {
        witness = witness.with_gpu_visible(visible == "yes");
    }
    witness.explain(error, key).map(|diagnosis| said(&diagnosis)).ok_or_else(|| format!("unexplained: {}", text(error)))
}

/// Name, sentence, remedy, the other way, and the facts.
fn said(diagnosis: &Diagnosis) -> String {
    let other = diagnosis.other_way().unwrap_or("-");
    format!("{} | {diagnosis} | {} | {other} | {}", diagnosis.cause.name(), diagnosis.remedy(), diagnosis.facts)
}

/// An error for the test to look at, and as its user reads it.
fn text(error: &ImportError) -> String {
    format!("{:?} | {error}", error.kind)
}

fn memory(words: &[&str]) -> RemoteMemory {
    let chunks: BTreeMap<u64, (u64, u64)> = words[2]
        .split(',')
        .map(|chunk| {
            let numbers: Vec<u64> = chunk.split(':').map(|number| number.parse().unwrap()).collect();
            (numbers[0], (numbers[1], numbers[2]))
        })
        .collect();
    RemoteMemory { index: 0, base: words[0].parse().unwrap(), len: words[1].parse().unwrap(), marked: false, chunks }
}

pub(crate) fn hex(rkey: &Rkey) -> String {
    rkey.encode().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read_rkey(text: &str) -> Rkey {
    let bytes: Vec<u8> = (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect();
    Rkey::decode(&bytes).unwrap()
}

fn read_key(text: &str) -> Key {
    key(&read_rkey(text))
}
