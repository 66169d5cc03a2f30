//! One running `player`: commands go to its standard input, answers come from its standard output, what UCX logs goes to a file.

use core::time::Duration;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Outcome;
use crate::wheel::Wheel;

/// How long a command may take; those that wait take their own time besides.
const PATIENCE: Duration = Duration::from_secs(30);

/// How a process is to be set up.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setup {
    /// With the lane: by the preload library, or where UCX has it itself, by nothing.
    pub(crate) preload: bool,
    /// Started by `cuda-ipc run`, which sees to the library and to reads.
    pub(crate) by_command: bool,
    /// The device's ordinal.
    pub(crate) device: u32,
    /// With UCM's hooks in the driver, which is UCX's default and takes a second to start.
    pub(crate) hooks: bool,
    /// In a PID namespace of its own, as its process 1.
    pub(crate) namespace: bool,
    /// There as its process 2, the first one being a shell.
    pub(crate) second: bool,
    /// Another release than the one under test.
    pub(crate) wheel: Option<Wheel>,
}

impl Setup {
    /// As the product is used.
    pub(crate) fn preload() -> Self {
        Self { preload: true, ..Self::default() }
    }

    /// UCX alone.
    pub(crate) fn stock() -> Self {
        Self::default()
    }

    /// By `cuda-ipc run`.
    pub(crate) fn by_command() -> Self {
        Self { by_command: true, ..Self::default() }
    }

    pub(crate) fn hooks(mut self) -> Self {
        self.hooks = true;
        self
    }

    pub(crate) fn namespace(mut self) -> Self {
        self.namespace = true;
        self
    }

    pub(crate) fn second_in_namespace(mut self) -> Self {
        (self.namespace, self.second) = (true, true);
        self
    }

    pub(crate) fn wheel(mut self, wheel: &Wheel) -> Self {
        self.wheel = Some(wheel.clone());
        self
    }

    pub(crate) fn device(mut self, device: u32) -> Self {
        self.device = device;
        self
    }
}

/// What a player says to a command.
pub(crate) enum Answer {
    Ok(String),
    /// The number and the text.
    Refused(i64, String),
}

/// See the module's documentation. Dropping it ends the process.
pub(crate) struct Player {
    pub(crate) name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    pub(crate) log: PathBuf,
    /// Commands and answers of all players so far.
    transcript: Arc<Mutex<String>>,
    /// Endpoints by the name of the player at the other end.
    pub(crate) endpoints: HashMap<String, u64>,
    pub(crate) device: u32,
    /// Whether UCX gives an error for a read that fails, instead of ending the process.
    pub(crate) survives_failed_reads: bool,
}

impl Player {
    /// Starts `command`, which runs the program; `log` is where its standard error goes.
    pub(crate) fn start(name: &str, mut command: Command, setup: &Setup, log: PathBuf, transcript: Arc<Mutex<String>>) -> Outcome<Self> {
        let failed = |error: std::io::Error| format!("{name}: {error}");
        let errors = File::create(&log).map_err(failed)?;
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors).spawn().map_err(failed)?;
        let input = child.stdin.take();
        let output = child.stdout.take().ok_or("no standard output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            name: name.to_owned(),
            child,
            input,
            lines,
            log,
            transcript,
            endpoints: HashMap::new(),
            device: setup.device,
            survives_failed_reads: true,
        })
    }

    /// What it has written to its standard error until now.
    pub(crate) fn said(&self) -> Outcome<String> {
        std::fs::read_to_string(&self.log).map_err(|error| format!("{}: {error}", self.log.display()))
    }

    /// The process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command and does not wait for its answer.
    pub(crate) fn send(&mut self, command: &str) -> Outcome {
        self.note(&format!("{}: {}", self.name, shortened(command)));
        let input = self.input.as_mut().ok_or("the player was told to end")?;
        writeln!(input, "{command}").map_err(|error| format!("{} does not listen: {error}", self.name))
    }

    /// Takes the answer to the oldest command that has none.
    pub(crate) fn receive(&mut self, patience: Duration) -> Outcome<Answer> {
        let line = self.lines.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("{} did not answer in {patience:?}", self.name),
            RecvTimeoutError::Disconnected => format!("{} has ended: {:?}", self.name, self.child.try_wait()),
        })?;
        self.note(&format!("{}:   {}", self.name, shortened(&line)));
        let (kind, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match kind {
            "ok" => Ok(Answer::Ok(rest.to_owned())),
            "error" => {
                let (code, text) = rest.split_once(' ').unwrap_or((rest, ""));
                Ok(Answer::Refused(code.parse().unwrap_or(-1), text.to_owned()))
            }
            _ => Err(format!("{} said `{}`", self.name, shortened(&line))),
        }
    }

    /// Runs a command that may be refused.
    pub(crate) fn try_ask(&mut self, command: &str) -> Outcome<Answer> {
        self.send(command)?;
        self.receive(PATIENCE)
    }

    /// Runs a command that has to work, and returns its values.
    pub(crate) fn ask(&mut self, command: &str) -> Outcome<String> {
        match self.try_ask(command)? {
            Answer::Ok(values) => Ok(values),
            Answer::Refused(code, text) => Err(format!("{}: {}: {text} ({code})", self.name, shortened(command))),
        }
    }

    /// As [`Player::ask`], for a command whose answer is numbers.
    pub(crate) fn numbers(&mut self, command: &str) -> Outcome<Vec<u64>> {
        let values = self.ask(command)?;
        values.split_whitespace().map(|word| parse(word).ok_or_else(|| format!("{}: `{word}` is no number", self.name))).collect()
    }

    /// As [`Player::ask`], for a command whose answer is one number.
    pub(crate) fn number(&mut self, command: &str) -> Outcome<u64> {
        self.numbers(command)?.first().copied().ok_or_else(|| format!("{}: {}: no value", self.name, shortened(command)))
    }

    /// Lets the process end as it ends when its work is done, and waits for that.
    pub(crate) fn end(&mut self) -> Outcome {
        self.input = None;
        match self.child.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("{}: {status}", self.name)),
            Err(error) => Err(format!("{}: {error}", self.name)),
        }
    }

    /// Lets the process end by exit(3), which runs what is to be run at the end, and waits for that. What it has logged in its life.
    pub(crate) fn exit(&mut self) -> Outcome<String> {
        self.ask("exit")?;
        self.end()?;
        std::fs::read_to_string(&self.log).map_err(|error| format!("{}: {error}", self.log.display()))
    }

    fn note(&self, line: &str) {
        let mut transcript = self.transcript.lock().unwrap_or_else(PoisonError::into_inner);
        transcript.push_str(line);
        transcript.push('\n');
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        self.input = None;
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// A number as players write it.
pub(crate) fn parse(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if word == "(nil)" => Some(0),
        None => word.parse().ok(),
    }
}

/// Keys and addresses are long, and nobody reads them.
fn shortened(line: &str) -> String {
    let word = |word: &str| if word.len() > 80 { format!("{}...({} digits)", &word[..16], word.len()) } else { word.to_owned() };
    line.split(' ').map(word).collect::<Vec<_>>().join(" ")
}
