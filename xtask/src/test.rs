//! `test`: runs every stage of CI, one after the other, and ends with a table of what passed and how long it took.
//!
//! With `--bugs` it runs the tests of the bug catalogue instead (`bugs`).
//!
//! What the stages are is `stages`' business; this file orders, times and counts them. A stage that fails does not keep the others from running,
//! except for `build`, without which the later ones would only repeat its errors.

mod bugs;
mod stages;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::workspace::{Failure, Workspace};
use stages::{Done, STAGES, Stage};

pub(crate) const USAGE: &str = "[--fast] [--stage NAME]... [--list] | --bugs";
/// The stage without which the later ones are pointless.
const BUILD: &str = "build";

/// Runs all stages, those named with `--stage`, or with `--fast` those that take seconds once things are built.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode, Failure> {
    let options = Options::parse(args)?;
    if options.bugs {
        return bugs::run(workspace);
    }
    if options.list {
        for stage in STAGES {
            println!("{:12}{}{}", stage.name, stage.help, if stage.slow { " (not with --fast)" } else { "" });
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut results = Vec::new();
    let mut broken = false;
    for stage in STAGES.iter().filter(|stage| options.stages.is_empty() || options.stages.iter().any(|name| name == stage.name)) {
        let start = Instant::now();
        let outcome = if options.fast && stage.slow {
            Outcome::Skipped("--fast".to_owned())
        } else if broken {
            Outcome::Skipped(format!("{BUILD} failed"))
        } else {
            println!("== stage {}", stage.name);
            Outcome::of((stage.run)(workspace))
        };
        match &outcome {
            Outcome::Failed(what) => eprintln!("== stage {} failed: {what}", stage.name),
            Outcome::Skipped(reason) => println!("== stage {} skipped: {reason}", stage.name),
            Outcome::Passed => {}
        }
        broken |= stage.name == BUILD && matches!(outcome, Outcome::Failed(_));
        results.push((stage, outcome, start.elapsed()));
    }
    Ok(report(&results))
}

/// Whether there is a stage of this name.
pub(crate) fn has_stage(name: &str) -> bool {
    STAGES.iter().any(|stage| stage.name == name)
}

struct Options {
    fast: bool,
    list: bool,
    bugs: bool,
    stages: Vec<String>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self, Failure> {
        let mut options = Self { fast: false, list: false, bugs: false, stages: Vec::new() };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--fast" => options.fast = true,
                "--list" => options.list = true,
                "--bugs" => options.bugs = true,
                "--stage" => {
                    let name = args.next().ok_or_else(|| Failure::Usage("--stage needs a name".to_owned()))?;
                    if !has_stage(name) {
                        let names: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
                        return Err(Failure::Usage(format!("there is no stage `{name}`; the stages are {}", names.join(", "))));
                    }
                    options.stages.push(name.clone());
                }
                other => return Err(Failure::unknown_argument(other)),
            }
        }
        if options.bugs && (options.fast || options.list || !options.stages.is_empty()) {
            return Err(Failure::Usage("--bugs runs the tests of the bug catalogue and nothing else".to_owned()));
        }
        Ok(options)
    }
}

enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

impl Outcome {
    fn of(result: Result<Done, Failure>) -> Self {
        match result {
            Ok(Done::Passed) => Self::Passed,
            Ok(Done::Skipped(reason)) => Self::Skipped(reason),
            Err(failure) => Self::Failed(failure.to_string()),
        }
    }
}

/// Prints the table and the closing lines; the exit code says whether any stage failed.
fn report(results: &[(&Stage, Outcome, Duration)]) -> ExitCode {
    println!("\n{:12}{:>9}  result", "stage", "seconds");
    let (mut passed, mut skipped, mut failed) = (0, 0, Vec::new());
    for (stage, outcome, time) in results {
        let text = match outcome {
            Outcome::Passed => {
                passed += 1;
                "passed".to_owned()
            }
            Outcome::Skipped(reason) => {
                skipped += 1;
                format!("skipped: {reason}")
            }
            Outcome::Failed(what) => {
                failed.push(stage.name);
                format!("FAILED: {}", what.lines().next().unwrap_or_default())
            }
        };
        println!("{:12}{:>9.1}  {text}", stage.name, time.as_secs_f64());
    }
    let total: Duration = results.iter().map(|(_, _, time)| *time).sum();
    println!("{:12}{:>9.1}", "total", total.as_secs_f64());
    if !failed.is_empty() {
        println!("failed stages: {}", failed.join(", "));
    }
    let skipped_text = if skipped == 0 { String::new() } else { format!(", {skipped} skipped") };
    println!("\nstages: {passed} passed, {} failed{skipped_text}", failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::{BUILD, Failure, Options, STAGES};

    fn parse(line: &str) -> Result<Options, Failure> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read() {
        let options = parse("--fast --stage fmt --stage tidy").expect("valid");
        assert!(options.fast && !options.list);
        assert_eq!(options.stages, ["fmt", "tidy"]);
    }

    #[test]
    fn unknown_words_are_usage_errors() {
        for line in ["--slow", "fmt", "--stage", "--stage nothing", "--bugs --fast", "--stage fmt --bugs"] {
            assert!(matches!(parse(line), Err(Failure::Usage(_))), "{line}");
        }
    }

    #[test]
    fn stage_names_are_unique_and_build_is_one() {
        let mut names: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
        assert!(names.contains(&BUILD));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STAGES.len());
    }
}
