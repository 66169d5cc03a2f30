//! Faults on demand: call number N of function F answers code C without effect, or is late.
//!
//! `FAKE_CUDA_FAULT` and `fake_cuda_add_fault` take rules separated by `;`: `cuMemMap#3=2` (third call answers 2), `cuMemMap#3+=2` (third and all
//! later), `cuMemMap#*~5ms` (every call late). Calls are numbered from the start of the process, or from the last `fake_cuda_clear_faults`. A name is
//! the exported symbol or, for all its versions at once, the base name.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::time::Duration;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use cuda_driver_sys::CUresult;

use crate::exports::{CALLS, Call};

struct Rule {
    name: String,
    from: u64,
    to: u64,
    effect: Effect,
}

#[derive(Clone, Copy)]
enum Effect {
    Answer(CUresult),
    Delay(Duration),
}

struct Faults {
    rules: Vec<Rule>,
    /// Calls per function since the numbering began.
    calls: Vec<u64>,
}

static FAULTS: Mutex<Faults> = Mutex::new(Faults { rules: Vec::new(), calls: Vec::new() });
static ANY: AtomicBool = AtomicBool::new(false);
static FROM_ENVIRONMENT: Once = Once::new();

/// Delays the call where a rule says so, and returns the code it must answer instead of acting.
pub(crate) fn check(call: Call) -> Option<CUresult> {
    FROM_ENVIRONMENT.call_once(|| {
        if let Ok(text) = std::env::var("FAKE_CUDA_FAULT")
            && !add(&text)
        {
            eprintln!("fake cuda: FAKE_CUDA_FAULT is not understood: {text}");
        }
    });
    if !ANY.load(Relaxed) {
        return None;
    }
    let (delay, answer) = {
        let mut faults = lock();
        let index = call as usize;
        faults.calls.resize(CALLS.len(), 0);
        faults.calls[index] += 1;
        let (number, info) = (faults.calls[index], &CALLS[index]);
        let hits = || faults.rules.iter().filter(|rule| (rule.from..=rule.to).contains(&number) && info.is_called(&rule.name));
        let delay: Duration = hits().filter_map(|rule| if let Effect::Delay(time) = rule.effect { Some(time) } else { None }).sum();
        let answer = hits().find_map(|rule| if let Effect::Answer(code) = rule.effect { Some(code) } else { None });
        (delay, answer)
    };
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
    answer
}

/// Adds rules; false, and none added, if the text is not understood.
pub(crate) fn add(text: &str) -> bool {
    let rules: Option<Vec<Rule>> = text.split(';').map(str::trim).filter(|rule| !rule.is_empty()).map(parse).collect();
    let Some(rules) = rules else { return false };
    let mut faults = lock();
    if faults.rules.is_empty() {
        // Calls are counted only while there are rules: numbering starts here.
        faults.calls.clear();
    }
    faults.rules.extend(rules);
    ANY.store(!faults.rules.is_empty(), Relaxed);
    true
}

/// Removes all rules and starts the numbering anew.
pub(crate) fn clear() {
    let mut faults = lock();
    faults.rules.clear();
    faults.calls.clear();
    ANY.store(false, Relaxed);
}

fn parse(rule: &str) -> Option<Rule> {
    let (name, rest) = rule.split_once('#')?;
    let at = rest.find(['=', '~'])?;
    let (from, to) = match rest[..at].trim() {
        "*" => (1, u64::MAX),
        number => match number.strip_suffix('+') {
            Some(first) => (first.parse().ok()?, u64::MAX),
            None => {
                let only = number.parse().ok()?;
                (only, only)
            }
        },
    };
    let value = rest[at + 1..].trim();
    let effect = if rest[at..].starts_with('=') { Effect::Answer(CUresult(value.parse().ok()?)) } else { Effect::Delay(duration(value)?) };
    let name = name.trim();
    CALLS.iter().any(|info| info.is_called(name)).then(|| Rule { name: name.to_owned(), from, to, effect })
}

fn duration(text: &str) -> Option<Duration> {
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let number: u64 = text[..at].parse().ok()?;
    match &text[at..] {
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}

fn lock() -> MutexGuard<'static, Faults> {
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner)
}
