//! Dependencies between our own crates point down only, and every crate takes edition, licence and lints from the workspace.

use serde_json::Value;

use super::{File, Finding, line_of};

/// Who may depend on whom; dev-dependencies are free, because nobody links them.
const EDGES: &[(&str, &[&str])] = &[
    ("cuda-driver-sys", &[]),
    ("pidfd-sys", &[]),
    ("cuda-ipc-core", &["cuda-driver-sys", "pidfd-sys"]),
    ("cuda-ipc-cache", &["cuda-ipc-core", "cuda-driver-sys", "pidfd-sys"]),
    ("cuda-ipc-ffi", &["cuda-ipc-cache", "cuda-ipc-core", "cuda-driver-sys", "pidfd-sys"]),
    ("cuda-ipc-preload", &["cuda-ipc-cache", "cuda-ipc-core", "cuda-driver-sys", "pidfd-sys"]),
    ("cuda-ipc-cli", &["cuda-ipc-cache", "cuda-ipc-core", "cuda-driver-sys", "pidfd-sys"]),
    ("cuda-ipc-tests", &["cuda-ipc-cache", "cuda-ipc-core", "cuda-driver-sys", "pidfd-sys"]),
    ("cudarc-example", &["cuda-ipc-cache", "cuda-ipc-core"]),
    ("fake-cuda", &["cuda-driver-sys"]),
    ("fake-nvml", &[]),
    ("syscall-shim", &[]),
    ("uct-cuda-stand-in", &[]),
    ("ucx-tests", &[]),
    ("xtask", &[]),
];

/// Lines that every member's manifest has.
const INHERITED: [&str; 4] =
    ["version.workspace = true", "edition.workspace = true", "rust-version.workspace = true", "license.workspace = true"];

/// Checks the members that cargo names.
pub(super) fn check(files: &[File], metadata: &Value) -> Vec<Finding> {
    let root = metadata["workspace_root"].as_str().unwrap_or_default();
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten().filter(|package| package["source"].is_null()) {
        let (name, manifest) = (text(&package["name"]), text(&package["manifest_path"]));
        let path = manifest.strip_prefix(root).unwrap_or(manifest).trim_start_matches('/');
        let manifest = files.iter().find(|file| file.path == path).map_or("", |file| file.text.as_str());
        findings.extend(inherits(path, manifest));
        let Some((_, allowed)) = EDGES.iter().find(|(crate_name, _)| *crate_name == name) else {
            findings.push(Finding::new(path, 1, format!("{name} is not in the table of layers (xtask/src/tidy/layers.rs)")));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = text(&dependency["name"]);
            if dependency["path"].is_string() && dependency["kind"] != "dev" && !allowed.contains(&to) {
                findings.push(Finding::new(path, line_of(manifest, |line| line.starts_with(to)), format!("{name} may not depend on {to}")));
            }
        }
    }
    findings
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// What a manifest should take from the workspace and does not.
fn inherits(path: &str, manifest: &str) -> Vec<Finding> {
    let mut missing: Vec<&str> = INHERITED.into_iter().filter(|line| !manifest.lines().any(|found| found.trim() == *line)).collect();
    let lints = manifest.lines().skip_while(|line| line.trim() != "[lints]").nth(1);
    if lints.map(str::trim) != Some("workspace = true") {
        missing.push("[lints] workspace = true");
    }
    missing.into_iter().map(|line| Finding::new(path, 1, format!("lacks `{line}`"))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Finding, file};
    use super::{EDGES, check, inherits};
    use serde_json::json;

    const GOOD: &str = "[package]\nname = \"x\"\nversion.workspace = true\nedition.workspace = true\nrust-version.workspace = true\n\
        license.workspace = true\n\n[dependencies]\ncuda-ipc-cache.workspace = true\n\n[lints]\nworkspace = true\n";

    #[test]
    fn inherited_settings_are_required() {
        assert_eq!(inherits("a/Cargo.toml", GOOD), []);
        assert_eq!(
            inherits("a/Cargo.toml", &GOOD.replace("[lints]\nworkspace = true\n", ""))[0].reason,
            "lacks `[lints] workspace = true`"
        );
        assert_eq!(inherits("a/Cargo.toml", &GOOD.replace("edition.workspace = true", "edition = \"2024\"")).len(), 1);
    }

    #[test]
    fn arrows_point_down() {
        let package = |name: &str, dependencies: serde_json::Value| json!({"name": name, "source": null, "manifest_path": format!("/somewhere/{name}/Cargo.toml"), "dependencies": dependencies});
        let metadata = json!({"workspace_root": "/somewhere", "packages": [
            package("cuda-ipc-core", json!([
                {"name": "cuda-ipc-cache", "path": "/somewhere/cuda-ipc-cache", "kind": null},
                {"name": "cuda-ipc-tests", "path": "/somewhere/tests", "kind": "dev"},
                {"name": "pidfd-sys", "path": "/somewhere/pidfd-sys", "kind": null},
                {"name": "zerocopy", "kind": null},
            ])),
            package("newcomer", json!([])),
            {"name": "libc", "source": "registry+x", "manifest_path": "/elsewhere", "dependencies": []},
        ]});
        let files = [file("cuda-ipc-core/Cargo.toml", GOOD), file("newcomer/Cargo.toml", GOOD)];
        let expected = [
            Finding::new("cuda-ipc-core/Cargo.toml", 9, "cuda-ipc-core may not depend on cuda-ipc-cache"),
            Finding::new("newcomer/Cargo.toml", 1, "newcomer is not in the table of layers (xtask/src/tidy/layers.rs)"),
        ];
        assert_eq!(check(&files, &metadata), expected);
    }

    /// The table itself points down: nobody may depend on a crate that may depend on it.
    #[test]
    fn the_table_has_no_cycle() {
        let below = |name: &str| EDGES.iter().find(|(from, _)| *from == name).map_or(&[][..], |(_, to)| *to);
        for (name, allowed) in EDGES {
            for to in *allowed {
                assert!(!below(to).contains(name), "{name} and {to}");
            }
        }
    }
}
