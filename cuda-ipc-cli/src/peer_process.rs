//! The processes of a command: separately executed, told what to do by a line, watched, and never waited for without an end.
//!
//! The command starts its own executable with the hidden subcommand `child ROLE`. They talk in lines of JSON: the command writes values to the child's
//! standard input, the child writes [`Message`]s to its standard output. The child's end of input means that it is no longer needed. Its standard error is
//! kept and shown if it fails. Two children never talk to each other; what one has to know of the other the command passes on.

use core::time::Duration;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Instant;

use clap::ValueEnum;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Role;
use crate::failure::Failure;
use crate::progress::Progress;

/// A line from a child.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message<T> {
    Progress { phase: String, done: u64, total: u64 },
    Value(T),
    Failed(Failure),
}

/// How long an ended conversation may take to become an ended process.
const EXIT_TIME: Duration = Duration::from_secs(10);
/// How much of a child's standard error is kept.
const STDERR_KEPT: usize = 16 << 10;

/// A child of this process, killed and reaped when dropped.
pub(crate) struct PeerProcess {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<io::Result<String>>,
    stderr: Option<JoinHandle<String>>,
    silence: Duration,
}

impl PeerProcess {
    /// Starts a child and tells it its `settings`. It is given up when nothing is heard of it for as long as `silence`.
    pub(crate) fn start(role: Role, settings: &impl Serialize, silence: Duration) -> Result<Self, Failure> {
        let name = role.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        let step = format!("starting the {name}");
        let program = std::env::current_exe().map_err(Failure::at(&step))?;
        let mut child = Command::new(program)
            .args(["child", &name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(Failure::at(&step))?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (sender, lines) = mpsc::channel();
        let mut peer = Self { name, child, input, lines, stderr: None, silence };
        peer.stderr = errors.map(|errors| std::thread::spawn(move || tail(errors)));
        if let Some(output) = output {
            // Ends with the child's output, or when nobody listens any more.
            std::thread::spawn(move || BufReader::new(output).lines().try_for_each(|line| sender.send(line)));
        }
        peer.send(settings)?;
        Ok(peer)
    }

    /// Writes a value to the child.
    pub(crate) fn send(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let written = match &mut self.input {
            Some(input) => write_line(input, value),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        match written {
            Ok(()) => Ok(()),
            // A closed pipe means that the child has ended, which says more.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(self.ended("has ended before it was told everything")),
            Err(error) => Err(Failure::new(format!("writing to the {}", self.name), error)),
        }
    }

    /// The child's next value, while its progress is shown.
    ///
    /// Errors: what the child reports; its end, with status and standard error; its silence, upon which it is killed.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, progress: &mut Progress) -> Result<T, Failure> {
        loop {
            let line = match self.lines.recv_timeout(self.silence) {
                Ok(Ok(line)) => line,
                Ok(Err(error)) => return Err(Failure::new(format!("reading from the {}", self.name), error)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended("has ended without an answer")),
                Err(RecvTimeoutError::Timeout) => return Err(self.silent()),
            };
            match serde_json::from_str(&line) {
                Ok(Message::Progress { phase, done, total }) => progress.show(&phase, done, total),
                Ok(Message::Value(value)) => return Ok(value),
                Ok(Message::Failed(failure)) => return Err(self.failed(failure)),
                Err(error) => return Err(Failure::new(format!("understanding the {}", self.name), error).note(format!("it wrote: {line}"))),
            }
        }
    }

    /// Tells the child that it is no longer needed, and waits for its end.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        self.input = None;
        match self.wait(EXIT_TIME) {
            Some(status) if status.success() => {
                self.show_stderr();
                Ok(())
            }
            Some(_) => {
                let reported = self.lines.try_iter().flatten().find_map(|line| match serde_json::from_str::<Message<()>>(&line) {
                    Ok(Message::Failed(failure)) => Some(failure),
                    _ => None,
                });
                Err(match reported {
                    Some(failure) => self.failed(failure),
                    None => self.ended("has failed after its work"),
                })
            }
            None => Err(self.silent()),
        }
    }

    /// If the child has ended by itself: the failure that says so. For when another child has failed and this one may be why.
    pub(crate) fn unexpected_end(&mut self) -> Option<Failure> {
        matches!(self.child.try_wait(), Ok(Some(_))).then(|| self.ended("has ended"))
    }

    /// Kills the child, as `kill -9` does; it is still to be reaped.
    pub(crate) fn kill(&mut self) -> Result<(), Failure> {
        self.child.kill().map_err(Failure::at("killing a child"))
    }

    /// Waits, not for ever, until a child that was killed is gone.
    pub(crate) fn reap(&mut self) {
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < EXIT_TIME {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn failed(&mut self, failure: Failure) -> Failure {
        let name = self.name.clone();
        let failure = match failure {
            Failure::Step { step, cause, notes } => Failure::Step { step: format!("{name}: {step}"), cause, notes },
            usage @ Failure::Usage(_) => usage,
        };
        self.with_stderr(failure)
    }

    /// The failure of a child whose pipes are closed.
    fn ended(&mut self, what: &str) -> Failure {
        let pid = self.child.id();
        let status = self.wait(EXIT_TIME).map_or_else(|| "is still running".to_owned(), |status| status.to_string());
        let failure = Failure::new(format!("the {} (pid {pid}) {what}", self.name), status);
        self.with_stderr(failure)
    }

    fn silent(&mut self) -> Failure {
        let pid = self.child.id();
        let seconds = self.silence.as_secs();
        let failure = Failure::new(format!("waiting for the {} (pid {pid})", self.name), format!("nothing heard for {seconds} s; killed"));
        self.with_stderr(failure)
    }

    /// Ends the child and adds what it wrote to standard error.
    fn with_stderr(&mut self, failure: Failure) -> Failure {
        let text = self.end();
        text.lines().fold(failure, |failure, line| failure.note(format!("{} wrote: {line}", self.name)))
    }

    /// Passes on what a successful child wrote to standard error.
    fn show_stderr(&mut self) {
        for line in self.end().lines() {
            eprintln!("{}: {line}", self.name);
        }
    }

    fn wait(&mut self, time: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if start.elapsed() < time => std::thread::sleep(Duration::from_millis(5)),
                _ => return None,
            }
        }
    }

    /// Kills the child if it runs, reaps it and returns the rest of its standard error; nothing the second time.
    fn end(&mut self) -> String {
        self.input = None;
        if self.wait(Duration::ZERO).is_none() {
            let _ = self.child.kill();
            // A process that is stuck in the kernel outlives its kill: then it is left to init.
            if self.wait(EXIT_TIME).is_none() {
                return String::new();
            }
        }
        self.stderr.take().and_then(|reader| reader.join().ok()).unwrap_or_default()
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// The last part of what `stream` gives until its end, without half lines in front.
fn tail(stream: impl Read) -> String {
    let (mut kept, mut len) = (VecDeque::new(), 0);
    for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
        len += line.len();
        kept.push_back(line);
        while len > STDERR_KEPT && kept.len() > 1 {
            len -= kept.pop_front().map_or(0, |line| line.len());
        }
    }
    kept.iter().map(|line| String::from_utf8_lossy(line) + "\n").collect()
}

fn write_line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// A child's end of the conversation.
pub(crate) struct Link {
    last_progress: Option<Instant>,
}

impl Link {
    /// The next value from the command.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        self.receive_unless_ended()?.ok_or_else(|| Failure::new("reading from the command", "it has ended"))
    }

    /// The next value from the command; `None` if it no longer needs this process.
    pub(crate) fn receive_unless_ended<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        let step = "reading from the command";
        let mut line = String::new();
        match io::stdin().lock().read_line(&mut line) {
            Ok(0) => Ok(None),
            Ok(_) => serde_json::from_str(&line).map(Some).map_err(Failure::at(step)),
            Err(error) => Err(Failure::new(step, error)),
        }
    }

    /// Waits until the command no longer needs this process.
    pub(crate) fn wait_for_end(&mut self) {
        // Whatever comes, it is the end.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
    }

    /// Sends a value to the command.
    pub(crate) fn send(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        write_line(&mut io::stdout().lock(), &Message::Value(value)).map_err(Failure::at("writing to the command"))
    }

    /// Tells the command how far this is, at most 20 times a second; also the sign of life that it waits for.
    pub(crate) fn progress(&mut self, phase: &str, done: u64, total: u64) -> Result<(), Failure> {
        const PAUSE: Duration = Duration::from_millis(50);
        if self.last_progress.is_some_and(|last| last.elapsed() < PAUSE) {
            return Ok(());
        }
        self.last_progress = Some(Instant::now());
        let message = Message::<()>::Progress { phase: phase.to_owned(), done, total };
        write_line(&mut io::stdout().lock(), &message).map_err(Failure::at("writing to the command"))
    }
}

/// Runs a child's `work`, reports its failure and gives its exit code.
pub(crate) fn serve(work: fn(&mut Link) -> Result<(), Failure>) -> ExitCode {
    match work(&mut Link { last_progress: None }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // If the command is gone too there is nobody to tell.
            let _ = write_line(&mut io::stdout().lock(), &Message::<()>::Failed(failure));
            ExitCode::FAILURE
        }
    }
}
