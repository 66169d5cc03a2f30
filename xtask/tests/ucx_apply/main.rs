//! `cargo xtask ucx-apply` against stand-in trees: it puts the lane in, twice is once, out again to the byte, and what does not fit changes nothing.
//!
//! The real trees are looked at by hand (`docs/ucx-integration.md` says with what outcome); the stand-ins (`stand_in`) are ours and carry only the names and statements
//! that the table needs.

// Tests have std and may panic; the lints are for the libraries.
#![allow(clippy::std_instead_of_core, clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod stand_in;

use std::path::Path;
use std::process::{Command, Output};

use stand_in::{RELEASES, Snapshot, StandIn};

const FOLDER: &str = "src/uct/cuda/cuda_ipc";
const OURS: [&str; 7] = [
    "cuda_ipc_lane.h",
    "cuda_ipc_lane.inl",
    "cuda_ipc_lane_int.h",
    "cuda_ipc_lane.c",
    "cuda_ipc_lane_export.c",
    "cuda_ipc_lane_import.c",
    "cuda_ipc_lane_lease.c",
];

fn xtask(tree: &Path, flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask")).arg("ucx-apply").arg("--source").arg(tree).args(flags).output().unwrap()
}

/// Standard output of a run that has to end well.
fn run(tree: &Path, flags: &[&str]) -> String {
    let output = xtask(tree, flags);
    assert!(output.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Standard error of a run that has to fail.
fn refused(tree: &Path, flags: &[&str]) -> String {
    let output = xtask(tree, flags);
    assert_eq!(output.status.code(), Some(1), "{flags:?}: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn table() -> String {
    std::fs::read_to_string(workspace().join("ucx/hooks.txt")).unwrap()
}

#[test]
fn it_goes_in_once_and_out_to_the_byte() {
    for release in RELEASES {
        let tree = StandIn::new(release);
        let before = tree.snapshot();
        assert_eq!(xtask(tree.path(), &["--check"]).status.code(), Some(1), "{release}: without the lane");
        run(tree.path(), &[]);
        let with = tree.snapshot();
        assert_ne!(with, before);
        for name in OURS {
            let ours = std::fs::read(workspace().join("ucx").join(name)).unwrap();
            assert_eq!(with[&format!("{FOLDER}/{name}")], ours, "{release}: {name}");
        }
        run(tree.path(), &["--check"]);
        run(tree.path(), &[]);
        assert!(tree.snapshot() == with, "{release}: twice is not once");
        run(tree.path(), &["--revert"]);
        assert!(tree.snapshot() == before, "{release}: not as it was");
        run(tree.path(), &["--revert"]);
        assert!(tree.snapshot() == before, "{release}: there was nothing to take out");
    }
}

/// The lines are where they belong, for places that need more than a line of their own.
#[test]
fn calls_stand_in_their_functions() {
    for release in RELEASES {
        let tree = StandIn::new(release);
        run(tree.path(), &[]);
        let md = tree.read(&format!("{FOLDER}/cuda_ipc_md.c"));
        let pack = between(&md, "\nuct_cuda_ipc_mkey_pack(", "\n}\n");
        let call = pack.find("uct_cuda_ipc_lane_mem_add_reg(address, length, memh, &key)").unwrap();
        assert!(call < pack.find("ucs_list_for_each(key").unwrap(), "{release}: the lane is asked first");
        let ep = tree.read(&format!("{FOLDER}/cuda_ipc_ep.c"));
        let copy = between(&ep, "\nuct_cuda_ipc_post_cuda_async_copy(", "\n}\n");
        assert!(copy.contains("uct_cuda_ipc_lane_get_remote_address(iov[0].length, &key->super,"), "{release}: {copy}");
        assert_eq!(ep.contains("uct_cuda_ipc_lane_get_remote_address(lengths[i], &key->super,"), release == "1.23", "{release}: lists");
        let cache = tree.read(&format!("{FOLDER}/cuda_ipc_cache.c"));
        let answer = if release == "1.21" { "        return UCS_OK;\n" } else { "        return;\n" };
        assert!(cache.contains(&format!("    if (uct_cuda_ipc_lane_unmap(mapped_addr)) {{\n{answer}    }}\n")), "{release}: {cache}");
        let makefile = tree.read("src/uct/cuda/Makefile.am");
        for name in OURS {
            assert!(makefile.contains(&format!("\tcuda_ipc/{name} \\\n")), "{release}: {name} is not in {makefile}");
        }
        assert!(copy.contains("uct_cuda_ipc_lane_copy(mapped_addr, dst, src, iov[0].length,"), "{release}: {copy}");
        let theirs = tree.read("test/gtest/uct/cuda/test_cuda_ipc_md.cc");
        let switched_off = theirs.matches(", \"CUDA_IPC_POSIX_FD=n\")\n").count();
        assert_eq!(switched_off, if release == "1.21" { 0 } else { 3 }, "{release}: {theirs}");
    }
}

/// A diff says what applying does, and nothing is written for it.
#[test]
fn a_diff_does_what_applying_does() {
    for release in RELEASES {
        let (tree, patched) = (StandIn::new(release), StandIn::new(release));
        let before = tree.snapshot();
        let diff = run(tree.path(), &["--diff"]);
        assert!(tree.snapshot() == before, "{release}: something was written");
        patched.patch(&diff);
        run(tree.path(), &[]);
        assert!(patched.snapshot() == tree.snapshot(), "{release}");
        assert_eq!(run(tree.path(), &["--diff"]), diff, "{release}: the same of a tree that has the lane");
    }
}

/// Whichever place has changed in UCX: the error names it, and the tree stays as it is.
#[test]
fn a_changed_place_changes_nothing() {
    for release in RELEASES {
        let anchors = anchors(release);
        assert!(anchors.len() > 20, "{release}: {} places", anchors.len());
        for (file, anchor) in anchors {
            let missing = StandIn::new(release);
            let written = as_written(&missing.read(&file), &anchor);
            missing.edit(&file, |text| replaced(text, &written, "something_else();", 1));
            assert_refused(&missing, &file, &anchor, release);
            // The same again in the same function: nobody can tell which is meant.
            let double = StandIn::new(release);
            double.edit(&file, |text| replaced(text, &written, &format!("{written}\n{written}"), 1));
            assert_refused(&double, &file, &anchor, release);
        }
    }
}

fn assert_refused(tree: &StandIn, file: &str, anchor: &str, release: &str) {
    let before = tree.snapshot();
    for flags in [&[][..], &["--check"], &["--diff"], &["--revert"]] {
        let error = refused(tree.path(), flags);
        for part in [file, &format!("`{anchor}`"), &format!("(UCX {release}")] {
            assert!(error.contains(part), "{flags:?}: no {part} in: {error}");
        }
    }
    assert!(tree.snapshot() == before, "{file}: {anchor}: something was written");
}

/// Each change of a tree that has the lane: by hand, in our lines or our files.
#[test]
fn a_change_of_ours_is_not_overwritten() {
    for release in RELEASES {
        let md = format!("{FOLDER}/cuda_ipc_md.c");
        let c_file = format!("{FOLDER}/cuda_ipc_lane.c");
        let edits: [(&str, &str, &str); 4] = [
            (&md, "    uct_cuda_ipc_lane_close();\n", ""),
            (&md, "    uct_cuda_ipc_lane_mem_dereg(memh);\n", "    uct_cuda_ipc_lane_mem_dereg(memh); /* mine */\n"),
            ("src/uct/cuda/Makefile.am", "$(NVML_LIBS) $(CUDA_IPC_LANE_LIBS)", "$(NVML_LIBS)"),
            (&c_file, "#if HAVE_CUDA_IPC_LANE", "#if 1"),
        ];
        for (file, from, to) in edits {
            let tree = StandIn::new(release);
            run(tree.path(), &[]);
            tree.edit(file, |text| replaced(text, from, to, 1));
            let before = tree.snapshot();
            for flags in [&[][..], &["--check"], &["--revert"]] {
                let error = refused(tree.path(), flags);
                assert!(error.contains(file) && error.contains(&format!("(UCX {release}")), "{flags:?}: {error}");
            }
            assert!(tree.snapshot() == before, "{file}: something was written");
        }
        // A file of ours alone is half a lane.
        let tree = StandIn::new(release);
        run(tree.path(), &[]);
        std::fs::remove_file(tree.path().join(&c_file)).unwrap();
        assert!(refused(tree.path(), &["--revert"]).contains(&c_file));
    }
}

#[test]
fn other_trees_are_named() {
    let tree = StandIn::new("1.22");
    tree.edit("configure.ac", |text| replaced(text, "[ucx_ver_minor], 22", "[ucx_ver_minor], 20", 1));
    let before = tree.snapshot();
    let error = refused(tree.path(), &[]);
    assert!(error.contains("UCX 1.20 is not in the table, which has 1.21, 1.22, 1.23 (master)"), "{error}");
    assert!(tree.snapshot() == before);
    std::fs::remove_file(tree.path().join("configure.ac")).unwrap();
    assert!(refused(tree.path(), &[]).contains("is that a UCX source tree?"));
    assert_eq!(xtask(tree.path(), &["--diff", "--check"]).status.code(), Some(64));
}

/// File and anchor of each of the table's hooks for a release.
fn anchors(release: &str) -> Vec<(String, String)> {
    let (mut file, mut wanted, mut found) = (String::new(), true, Vec::new());
    for line in table().lines() {
        let Some((word, rest)) = line.split_once(' ') else { continue };
        match word {
            "file" => file = rest.to_owned(),
            "for" => wanted = rest.split(' ').any(|name| name == release),
            "before" | "after" | "replace" => {
                if wanted {
                    found.push((file.clone(), rest.split(" => ").next().unwrap().to_owned()));
                }
                wanted = true;
            }
            _ => {}
        }
    }
    found
}

/// An anchor as it stands in the text, where its words may be further apart.
fn as_written(text: &str, anchor: &str) -> String {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let line = text.lines().map(str::trim).find(|line| line.contains(anchor) || words(line) == anchor);
    let line = line.unwrap_or_else(|| panic!("no `{anchor}` in:\n{text}"));
    if line.contains(anchor) { anchor.to_owned() } else { line.to_owned() }
}

/// With the first `count` occurrences replaced; there has to be one.
fn replaced(text: &str, from: &str, to: &str, count: usize) -> String {
    assert!(text.contains(from), "no `{from}` in:\n{text}");
    text.replacen(from, to, count)
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    let rest = &text[text.find(start).unwrap_or_else(|| panic!("no {start} in:\n{text}"))..];
    &rest[..rest.find(end).unwrap()]
}

/// A stand-in is worth something only if it has what the table needs and nothing of ours.
#[test]
fn stand_ins_carry_the_anchors_only() {
    for release in RELEASES {
        let tree = StandIn::new(release);
        let files: Snapshot = tree.snapshot();
        for (file, anchor) in anchors(release) {
            as_written(&tree.read(&file), &anchor);
        }
        assert!(files.values().all(|bytes| !String::from_utf8_lossy(bytes).contains("lane")), "{release}");
    }
}
