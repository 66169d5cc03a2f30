//! Commands in the documents: each block of them is run as it stands, or says what it needs (`commands/blocks.rs`).
//!
//! This file finds the documents, runs a block in bash on the fake driver, and compares names of tasks in running text with the tasks that there are.
//! `dist/trials.rs` runs the blocks that are a new user's session.

mod blocks;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use xshell::cmd;

use crate::driver::{FAKE_PACKAGES, FakeDriver, Profile};
use crate::workspace::{Failure, Workspace};
use blocks::{Block, Kind, blocks};

/// Words that a reader puts something of their own for, and what stands for it here; and where cargo's output is.
///
/// `{scratch}` is a fresh folder, `{target}` cargo's target folder, `{root}` the checkout.
const PLACEHOLDERS: &[(&str, &str)] = &[
    ("train.py", "{root}/xtask/commands/train.py"),
    ("program.c", "{root}/xtask/commands/program.c"),
    ("FOLDER", "{scratch}/folder"),
    ("target/", "{target}/"),
];

/// How long a session may take, in seconds.
const PATIENCE: &str = "900";

/// A document and its blocks.
struct Document {
    path: String,
    text: String,
    blocks: Vec<Block>,
}

/// Runs every block that is not said to need something.
pub(crate) fn check(workspace: &Workspace) -> Result<(), Failure> {
    let documents = documents(workspace)?;
    let help = workspace.cargo("run --quiet --package cuda-ipc-cli -- --help").read()?;
    let subcommands = subcommands(&help);
    let wrong = |document: &Document| {
        let mut wrong = unknown_tasks(&document.path, &document.text);
        wrong.extend(unknown_subcommands(&document.path, &document.text, &subcommands));
        wrong
    };
    let wrong: Vec<String> = documents.iter().flat_map(wrong).collect();
    if !wrong.is_empty() {
        return Err(Failure::task(wrong.join("; ")));
    }
    workspace.cargo(&format!("build {FAKE_PACKAGES}")).run()?;
    let fake = FakeDriver::link(workspace, Profile::Debug)?;
    let scratch = workspace.target.join("commands");
    let mut ran = 0;
    let mut left = Vec::new();
    for document in &documents {
        for block in &document.blocks {
            let at = format!("{}:{}", document.path, block.line);
            match &block.kind {
                Kind::Run => {
                    workspace.shell.remove_path(&scratch)?;
                    workspace.shell.create_dir(&scratch)?;
                    let script = filled_in(&block.text, workspace, &scratch);
                    let began = Instant::now();
                    Session::new(&workspace.root).envs(environment(&fake)).run(&script, &at)?;
                    println!("{at}: ran, {:.1} s", began.elapsed().as_secs_f64());
                    ran += 1;
                }
                Kind::Needs(what) => left.push(format!("{at}: not run, it needs {what}")),
                Kind::Trial(name) => left.push(format!("{at}: run by stage dist, as trial `{name}`")),
                Kind::CodeOf(path) => same_lines(workspace, block, path, &at)?,
                Kind::Shows => {}
            }
        }
    }
    println!("{}", left.join("\n"));
    println!("commands: {ran} blocks ran, {} say what they need", left.len());
    Ok(())
}

/// The script of the trial `name`: its blocks in the document, in their order.
pub(crate) fn trial(workspace: &Workspace, document: &str, name: &str) -> Result<String, Failure> {
    let text = workspace.read(document)?;
    let found = blocks(&text).map_err(|(line, why)| Failure::task(format!("{document}:{line}: {why}")))?;
    let script: String = found.into_iter().filter(|block| block.kind == Kind::Trial(name.to_owned())).map(|block| block.text).collect();
    if script.is_empty() { Err(Failure::task(format!("{document} has no block of trial `{name}`"))) } else { Ok(script) }
}

/// What lets a program open the fake driver, and a linker find it.
pub(crate) fn environment(fake: &FakeDriver) -> Vec<(&'static str, OsString)> {
    fake.environment().into_iter().chain([("LIBRARY_PATH", fake.folder().as_os_str().to_owned())]).collect()
}

/// A shell in which somebody types what a document says.
pub(crate) struct Session(Command);

impl Session {
    /// In this folder, with this process's environment.
    pub(crate) fn new(folder: &Path) -> Self {
        // The first command that fails is the end, each is seen before it runs, and none runs for ever.
        let mut bash = Command::new("timeout");
        bash.args(["--kill-after=5", PATIENCE, "bash", "-euxo", "pipefail"]);
        bash.current_dir(folder).stdin(Stdio::null());
        Self(bash)
    }

    pub(crate) fn envs(mut self, variables: impl IntoIterator<Item = (&'static str, OsString)>) -> Self {
        self.0.envs(variables);
        self
    }

    /// Takes variables away.
    pub(crate) fn without(mut self, names: &[&str]) -> Self {
        for name in names {
            self.0.env_remove(name);
        }
        self
    }

    /// Runs the script; its standard output. Errors: all that was said, with `what` it was.
    pub(crate) fn run(mut self, script: &str, what: &str) -> Result<String, Failure> {
        // What a script has started and not waited for would keep its output open.
        let script = format!("trap 'jobs -p | xargs -r kill' EXIT\n{script}");
        let output = self.0.arg("-c").arg(script).output().map_err(|error| Failure::task(format!("{what}: bash: {error}")))?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(said);
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        Err(Failure::task(format!(
            "{what}: these commands ended with {}. If they cannot be run here, or are none, CONTRIBUTING.md says how to mark them.\n{said}{errors}",
            output.status
        )))
    }
}

fn documents(workspace: &Workspace) -> Result<Vec<Document>, Failure> {
    let list = cmd!(workspace.shell, "git ls-files --cached --others --exclude-standard -- *.md").quiet().read()?;
    let mut paths: Vec<PathBuf> = list.lines().map(PathBuf::from).filter(|path| workspace.root.join(path).is_file()).collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let path = path.to_string_lossy().into_owned();
            let text = workspace.read(&path)?;
            let blocks = blocks(&text).map_err(|(line, why)| Failure::task(format!("{path}:{line}: {why}")))?;
            Ok(Document { path, text, blocks })
        })
        .collect()
}

fn filled_in(script: &str, workspace: &Workspace, scratch: &Path) -> String {
    let places = [("{root}", &*workspace.root), ("{target}", &*workspace.target), ("{scratch}", scratch)];
    PLACEHOLDERS.iter().fold(script.to_owned(), |script, (word, meaning)| {
        let meaning = places.iter().fold((*meaning).to_owned(), |text, (name, path)| text.replace(name, &path.to_string_lossy()));
        script.replace(word, &meaning)
    })
}

/// Each line of the block stands in the file, which the compiler sees; comments aside.
fn same_lines(workspace: &Workspace, block: &Block, path: &str, at: &str) -> Result<(), Failure> {
    let file = workspace.read(path)?;
    // Documentation has its code behind a comment's sign.
    let there: Vec<&str> = file.lines().map(code).collect();
    match block.text.lines().map(code).find(|line| !line.is_empty() && !there.contains(line)) {
        Some(missing) => Err(Failure::task(format!("{at}: `{missing}` does not stand in {path}"))),
        None => Ok(()),
    }
}

fn code(line: &str) -> &str {
    let line = line.trim_start().trim_start_matches("//!").trim_start_matches("///");
    line.split("//").next().unwrap_or_default().trim()
}

/// Tasks and stages that running text names as code and that do not exist.
fn unknown_tasks(path: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (number, code) in code_of(text).filter(|(_, code)| code.contains("cargo xtask ")) {
        let mut words = code.split_whitespace().skip_while(|word| *word != "xtask").skip(1);
        if let Some(task) = words.next().filter(|task| is_name(task))
            && !crate::has_task(task)
        {
            wrong.push(format!("{path}:{number}: there is no task `{task}`"));
        }
        if let Some(stage) = words.skip_while(|word| *word != "--stage").nth(1).filter(|stage| *stage != "NAME")
            && !crate::test::has_stage(stage)
        {
            wrong.push(format!("{path}:{number}: there is no stage `{stage}`"));
        }
    }
    wrong
}

/// Subcommands of our program that text names as code and that it does not have.
fn unknown_subcommands(path: &str, text: &str, known: &[&str]) -> Vec<String> {
    let named = |code: &str| code.strip_prefix("cuda-ipc ").and_then(|rest| rest.split_whitespace().next()).map(str::to_owned);
    let found = code_of(text).filter_map(|(number, code)| Some((number, named(code).filter(|word| is_name(word))?)));
    let unknown = found.filter(|(_, word)| !known.contains(&word.as_str()));
    unknown.map(|(number, word)| format!("{path}:{number}: `cuda-ipc` has no command `{word}`")).collect()
}

/// The commands in the help of our program.
fn subcommands(help: &str) -> Vec<&str> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| line.starts_with(' '));
    list.filter_map(|line| line.split_whitespace().next()).collect()
}

/// Code in running text, and lines of blocks, each with the number of its line.
fn code_of(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().zip(1..).flat_map(|(line, number)| {
        let spans = line.split('`').skip(1).step_by(2);
        spans.chain(line.strip_prefix("    ")).map(move |code| (number, code))
    })
}

/// Whether this is a name, and not a placeholder or an option.
fn is_name(word: &str) -> bool {
    word.starts_with(|first: char| first.is_ascii_lowercase()) && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::{Session, code, subcommands, unknown_subcommands, unknown_tasks};
    use std::path::Path;

    #[test]
    fn a_script_ends_with_its_first_failure() {
        let run = |script: &str| Session::new(Path::new("/")).run(script, "a.md:1").map_err(|failure| failure.to_string());
        assert_eq!(run("pwd; x=2 # a remark\necho $x"), Ok("/\n2\n".to_owned()));
        let failed = run("echo before\nfalse\necho after").expect_err("false fails");
        assert!(failed.starts_with("a.md:1: ") && failed.contains("before\n") && failed.contains("+ false") && !failed.contains("after\n"));
        assert!(run("false | true").is_err() && run("echo $NO_SUCH_VARIABLE_HERE").is_err());
    }

    #[test]
    fn tasks_and_stages_have_to_exist() {
        let text = "`cargo xtask tidy` `cargo xtask test --stage fmt` `cargo xtask TASK` `cargo xtask`\n    cargo xtask demo # x\n`xtask nothing`\n";
        assert_eq!(unknown_tasks("a.md", text), Vec::<String>::new());
        assert_eq!(
            unknown_tasks("a.md", "x\n`cargo xtask nothing` `cargo xtask test --stage never`"),
            ["a.md:2: there is no task `nothing`", "a.md:2: there is no stage `never`"]
        );
    }

    #[test]
    fn commands_of_the_program_have_to_exist() {
        let known = subcommands("What it does\n\nCommands:\n  demo    Shares\n  doctor  Says\n\nOptions:\n  -h  Help\n");
        assert_eq!(known, ["demo", "doctor"]);
        let text =
            "`cuda-ipc demo --json` `cuda-ipc COMMAND` cuda-ipc is `cuda-ipc`\n\n    cuda-ipc doctor\n    cuda-ipc: a line of output\n";
        assert_eq!(unknown_subcommands("a.md", text, &known), Vec::<String>::new());
        assert_eq!(unknown_subcommands("a.md", "x\n`cuda-ipc heal`", &known), ["a.md:2: `cuda-ipc` has no command `heal`"]);
    }

    #[test]
    fn code_is_what_is_no_comment() {
        assert_eq!(code("    //! let x = y(); // why"), "let x = y();");
        assert_eq!(code("let x = y();            // other words"), "let x = y();");
    }
}
