//! Checks that a row of the table names the symbol that the headers pair with its version.
//!
//! `cudaTypedefs.h` has the versions of a function and `cuda.h` says, by a macro, which symbol the newest one is, or declares it without one. Only
//! the newest version's symbol can be told from one header; with two header versions, few rows are left unchecked.

/// Compares every row of `table.rs` whose version is the newest in these headers. Gives one line a finding.
pub(super) fn compare(table: &str, typedefs: &str, cuda: &str, label: &str) -> Vec<String> {
    let mut findings = Vec::new();
    for (number, line) in table.lines().enumerate() {
        let Some((base, version, symbol)) = row(line) else { continue };
        if newest_version(typedefs, base) != Some(version) {
            continue;
        }
        let right = match macro_value(cuda, base) {
            Some(value) => value == symbol,
            None => cuda.contains(&format!("CUDAAPI {symbol}(")),
        };
        if !right {
            findings.push(format!("cuda-driver-sys/src/table.rs:{}: {base} {version} is not {symbol} in the {label} headers", number + 1));
        }
    }
    findings
}

/// Reads `… = ("base", version, "symbol");`.
fn row(line: &str) -> Option<(&str, u32, &str)> {
    let (_, tuple) = line.trim().strip_suffix(");")?.split_once(" = (")?;
    let mut parts = tuple.split(", ");
    let base = parts.next()?.trim_matches('"');
    let version = parts.next()?.parse().ok()?;
    Some((base, version, parts.next()?.trim_matches('"')))
}

/// The highest N of `PFN_<base>_vN`, per-thread variants (`_ptds`, `_ptsz`) aside.
fn newest_version(typedefs: &str, base: &str) -> Option<u32> {
    let prefix = format!("*PFN_{base}_v");
    typedefs.match_indices(&prefix).filter_map(|(at, _)| typedefs[at + prefix.len()..].split_once(')')?.0.parse().ok()).max()
}

/// What `#define <base>` makes of the name, looking through `__CUDA_API_PTDS(…)`.
fn macro_value<'a>(cuda: &'a str, base: &str) -> Option<&'a str> {
    let value = cuda.lines().find_map(|line| line.strip_prefix("#define ")?.strip_prefix(base)?.strip_prefix(' '))?;
    Some(value.trim().trim_start_matches("__CUDA_API_PTDS(").trim_start_matches("__CUDA_API_PTSZ(").trim_end_matches(')'))
}

#[cfg(test)]
mod tests {
    use super::compare;

    const TYPEDEFS: &str = "typedef CUresult (CUDAAPI *PFN_cuF_v3020)(int);\ntypedef CUresult (CUDAAPI *PFN_cuF_v2000)(int);\n\
        typedef CUresult (CUDAAPI *PFN_cuF_v7000_ptds)(int);\ntypedef CUresult (CUDAAPI *PFN_cuFar_v9000)(int);\n";
    const CUDA: &str = "#define cuFar    cuFar_v3\n#define cuF     __CUDA_API_PTDS(cuF_v2)\n";

    #[test]
    fn the_macro_decides_for_the_newest_version_only() {
        let ok = "    required cuF: PFN_cuF_v3020 = (\"cuF\", 3020, \"cuF_v2\");\n    required cuF_old: PFN_cuF_v2000 = (\"cuF\", 2000, \"cuF\");\n";
        assert_eq!(compare(ok, TYPEDEFS, CUDA, "12.9"), Vec::<String>::new());
        let wrong = ok.replace("\"cuF_v2\"", "\"cuF\"");
        assert_eq!(compare(&wrong, TYPEDEFS, CUDA, "12.9"), ["cuda-driver-sys/src/table.rs:1: cuF 3020 is not cuF in the 12.9 headers"]);
    }

    #[test]
    fn without_a_macro_the_symbol_must_be_declared() {
        let row = "optional cuF: PFN_cuF_v3020 = (\"cuF\", 3020, \"cuF\");";
        assert_eq!(compare(row, TYPEDEFS, "CUresult CUDAAPI cuF(int);", "12.9"), Vec::<String>::new());
        assert_eq!(compare(row, TYPEDEFS, "CUresult CUDAAPI cuF_v2(int);", "12.9").len(), 1);
    }
}
