//! UCX's settings that decide whether it uses cuda_ipc at all.
//!
//! Only the environment is looked at; what a program sets by itself, or a configuration file of UCX, is not seen here.

/// Lets cuda_ipc read, not only write, where there is no NVLink.
pub(super) const ENABLE_READS: &str = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY";

/// What is to be done and said.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Findings {
    /// [`ENABLE_READS`] is to be set.
    pub(super) enable_reads: bool,
    /// Lines for the user.
    pub(super) notes: Vec<String>,
}

/// Looks at the settings. `nvlink` is asked only if the answer matters.
pub(super) fn look(variable: impl Fn(&str) -> Option<String>, nvlink: &dyn Fn() -> Option<bool>) -> Findings {
    let mut findings = Findings::default();
    reads(variable(ENABLE_READS), nvlink, &mut findings);
    let mut warn = |text: String| findings.notes.push(format!("WARN {text}"));
    if let Some(value) = variable("UCX_TLS").filter(|value| !allows(value, &["cuda_ipc", "\\cuda_ipc", "cuda"])) {
        warn(format!("UCX_TLS={value} leaves out cuda_ipc, so UCX will not use it: add cuda_ipc, or cuda for all that it has for GPUs"));
    }
    // The device of cuda_ipc is named `cuda` and counts as shared memory.
    if let Some(value) = variable("UCX_SHM_DEVICES").filter(|value| !allows(value, &["cuda"])) {
        warn(format!("UCX_SHM_DEVICES={value} leaves out the device of cuda_ipc, so UCX will not use it: add cuda"));
    }
    if let Some(value) = variable("UCX_MEM_CUDA_HOOK_MODE").filter(|value| value.split(',').any(|mode| mode.eq_ignore_ascii_case("reloc")))
    {
        warn(format!(
            "UCX_MEM_CUDA_HOOK_MODE={value} makes UCX go round the preload library, so the lane is lost: unset it, or set it to bistro or none"
        ));
    }
    if let Some(value) = variable("NIXL_UCX_DEEPBIND").filter(|value| is_on(value)) {
        warn(format!("NIXL_UCX_DEEPBIND={value} may bind UCX to the driver past the preload library, and then the lane is lost: unset it"));
    }
    findings
}

fn reads(setting: Option<String>, nvlink: &dyn Fn() -> Option<bool>, findings: &mut Findings) {
    match setting {
        None => match nvlink() {
            Some(true) => {}
            Some(false) => {
                findings.enable_reads = true;
                findings.notes.push(format!("no NVLink is seen, so {ENABLE_READS}=y is set: UCX would write by cuda_ipc, but not read"));
            }
            None => findings.enable_reads = true,
        },
        Some(value) if !is_on(&value) && nvlink() == Some(false) => {
            findings.notes.push(format!(
                "WARN {ENABLE_READS}={value}, and no NVLink is seen: UCX will not read by cuda_ipc; unset it, or set it to y"
            ));
        }
        Some(_) => {}
    }
}

/// Whether a list of UCX's lets one of `names` through. `^` in front of the list turns it round; `all` as its first word is everything.
///
/// Source: `ucs_config_sscanf_allow_list_impl`, `ucp_is_resource_in_transports_list`.
fn allows(list: &str, names: &[&str]) -> bool {
    let (is_negated, words) = match list.strip_prefix('^') {
        Some(words) => (true, words),
        None => (false, list),
    };
    let mut words = words.split(',').peekable();
    words.peek() == Some(&"all") || words.any(|word| names.contains(&word)) != is_negated
}

/// UCX's words for yes.
fn is_on(value: &str) -> bool {
    ["y", "yes", "on", "1", "true"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::{Findings, allows, look};

    /// With a machine that has no NVLink, unless NVML is not there.
    fn found(settings: &[(&str, &str)], nvlink: Option<bool>) -> Findings {
        look(|name| settings.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned()), &|| nvlink)
    }

    fn notes(settings: &[(&str, &str)]) -> Vec<String> {
        found(settings, Some(true)).notes
    }

    #[test]
    fn reading_is_switched_on_where_ucx_would_not() {
        let none = Findings::default();
        assert_eq!(found(&[], Some(true)), none);
        assert_eq!(found(&[], None), Findings { enable_reads: true, notes: vec![] });
        let said = found(&[], Some(false));
        assert!(said.enable_reads && said.notes.len() == 1 && said.notes[0].contains("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y"), "{said:?}");
        // What the user has set stays; if it costs the lane, that is said.
        for value in ["y", "on", "1"] {
            assert_eq!(found(&[("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", value)], Some(false)), none);
        }
        for value in ["n", "auto"] {
            let said = found(&[("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", value)], Some(false));
            assert!(!said.enable_reads && said.notes.len() == 1, "{said:?}");
            assert_eq!(found(&[("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", value)], Some(true)), none);
        }
    }

    #[test]
    fn transports() {
        for good in ["all", "cuda_ipc", "\\cuda_ipc,sm", "cuda,sm", "sm,tcp,cuda_copy,cuda_ipc", "^tcp", "^ib,rc", "^all"] {
            assert_eq!(notes(&[("UCX_TLS", good)]), [""; 0], "{good}");
        }
        for bad in ["tcp", "rc,sm,cuda_copy", "^cuda_ipc", "^cuda", "^tcp,cuda_ipc", "tcp,cuda_ipc_x", ""] {
            let said = notes(&[("UCX_TLS", bad)]);
            assert!(said.len() == 1 && said[0].starts_with("WARN UCX_TLS="), "{bad}: {said:?}");
        }
        assert!(allows("cuda", &["cuda"]) && !allows("memory", &["cuda"]));
    }

    #[test]
    fn other_settings() {
        assert_eq!(notes(&[("UCX_MEM_CUDA_HOOK_MODE", "bistro"), ("NIXL_UCX_DEEPBIND", "0"), ("UCX_SHM_DEVICES", "memory,cuda")]), [""; 0]);
        for (name, value) in [
            ("UCX_MEM_CUDA_HOOK_MODE", "reloc"),
            ("UCX_MEM_CUDA_HOOK_MODE", "bistro,reloc"),
            ("NIXL_UCX_DEEPBIND", "1"),
            ("UCX_SHM_DEVICES", "memory"),
        ] {
            let said = notes(&[(name, value)]);
            assert!(said.len() == 1 && said[0].contains(&format!("{name}={value}")), "{said:?}");
        }
    }
}
