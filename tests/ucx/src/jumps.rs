//! A call that the compiler has turned into a jump: its return address is the caller's caller's, so the preload library would not know whose call it is.

use std::path::Path;
use std::process::Command;

use crate::Outcome;

/// What a module does with the functions that the preload library answers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Calls, by name and how many.
    pub(crate) calls: Vec<(String, usize)>,
    /// Jumps: the function they are in, and the name.
    pub(crate) jumps: Vec<(String, String)>,
}

/// Disassembles `module` and finds what calls, and what jumps to, the linkage stubs of `names`.
pub(crate) fn uses(module: &Path, names: &[String]) -> Outcome<Uses> {
    let output = Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(module).output();
    let output = output.map_err(|error| format!("objdump (of binutils): {error}"))?;
    if !output.status.success() {
        return Err(format!("objdump: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(parse(&String::from_utf8_lossy(&output.stdout), names))
}

/// The symbols that a library exports, of those that the driver has too.
pub(crate) fn interposed(preload: &Path) -> Outcome<Vec<String>> {
    let output = Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(preload).output();
    let output = output.map_err(|error| format!("nm (of binutils): {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().filter_map(|line| line.split(' ').next()).filter(|name| name.starts_with("cu")).map(str::to_owned).collect())
}

fn parse(listing: &str, names: &[String]) -> Uses {
    let mut uses = Uses::default();
    let mut function = "";
    for line in listing.lines() {
        // "0000000000001000 <name>:"
        if let Some(name) = line.strip_suffix(">:").and_then(|line| line.split_once('<')) {
            function = name.1;
            continue;
        }
        // "    1000:  call  2000 <name@plt>"; lines of a stub itself have its name as the function.
        let Some(target) = line.split_once('<').and_then(|(_, rest)| rest.split_once("@plt>")).map(|(name, _)| name) else { continue };
        let Some(instruction) = line.split_whitespace().nth(1).map(|word| if word == "bnd" { "jmp" } else { word }) else { continue };
        if function.ends_with("@plt") || !names.iter().any(|name| name == target) {
            continue;
        }
        if instruction.starts_with("call") {
            match uses.calls.iter_mut().find(|(name, _)| name == target) {
                Some((_, count)) => *count += 1,
                None => uses.calls.push((target.to_owned(), 1)),
            }
        } else if instruction.starts_with('j') {
            uses.jumps.push((function.to_owned(), target.to_owned()));
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::{Uses, parse};

    #[test]
    fn calls_and_jumps_are_told_apart() {
        let listing = "\
0000000000001000 <cuMemMap@plt>:
    1000:\tjmp    *0x2fe2(%rip)        # 4000 <cuMemMap>
    100b:\tjmp    1000 <cuMemMap@plt>

0000000000002000 <open>:
    2000:\tcall   1000 <cuMemMap@plt>
    2005:\tcall   1000 <cuMemMap@plt>
    200a:\tje     2000 <open>
    200c:\tjmp    1000 <cuMemMap@plt>
    2011:\tbnd jmp 1000 <cuMemMap@plt>
    2011:\tjmp    1010 <free@plt>
    2011:\tcallq  1010 <cuMemUnmap@plt>
";
        let names = ["cuMemMap".to_owned(), "cuMemUnmap".to_owned()];
        let jump = ("open".to_owned(), "cuMemMap".to_owned());
        let expected = Uses { calls: vec![("cuMemMap".to_owned(), 2), ("cuMemUnmap".to_owned(), 1)], jumps: vec![jump.clone(), jump] };
        assert_eq!(parse(listing, &names), expected);
    }
}
