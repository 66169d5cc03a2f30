//! What a user reads: names, sentences, remedies.

use std::collections::BTreeSet;

use cuda_ipc_core::diagnosis::{BrokerFailure, Call, Cause, Diagnosis, Facts, Failure, KernelVersion, Trial, Yama};

use crate::{ENOSYS, EPERM};

const ALL: [Cause; 21] = [
    Cause::Seccomp { call: Call::PidfdGetfd, errno: EPERM },
    Cause::Yama { scope: 1 },
    Cause::Yama { scope: 2 },
    Cause::Yama { scope: 3 },
    Cause::OtherUid,
    Cause::NotDumpable,
    Cause::MoreCapabilities,
    Cause::OtherPidNamespace,
    Cause::OtherUserNamespace,
    Cause::KernelWithoutCall { call: Call::PidfdOpen },
    Cause::KernelWithoutCall { call: Call::PidfdGetfd },
    Cause::ExporterGone,
    Cause::FirstThreadExited,
    Cause::FdLimit { limit: Some(64) },
    Cause::FdLimit { limit: None },
    Cause::GpuNotVisible,
    Cause::NoHandleType,
    Cause::FabricOnly,
    Cause::NoListener { socket_dir: false },
    Cause::NoListener { socket_dir: true },
    Cause::Unknown,
];

#[test]
fn every_cause_has_a_name_a_number_a_sentence_and_a_remedy_of_its_own() {
    let (mut names, mut numbers, mut sentences) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for cause in ALL {
        names.insert(cause.name());
        numbers.insert(cause.index());
        let (sentence, remedy) = (cause.to_string(), cause.remedy());
        assert!(sentences.insert(sentence.clone()), "{sentence}");
        assert!(!remedy.text.is_empty() && remedy.text.chars().next().is_some_and(char::is_uppercase), "{cause:?}");
        assert!(remedy.commands.iter().all(|command| !command.is_empty() && !command.contains('\n')), "{cause:?}");
        println!("{}: {sentence}\n    {remedy}", cause.name());
    }
    assert_eq!((names.len(), numbers.len()), (Cause::COUNT, Cause::COUNT));
    assert_eq!(numbers.last(), Some(&(Cause::COUNT - 1)));
}

#[test]
fn sentences_say_the_facts() {
    assert_eq!(
        Cause::Seccomp { call: Call::PidfdGetfd, errno: EPERM }.to_string(),
        "a filter of system calls (seccomp) on this process stops pidfd_getfd with errno 1"
    );
    assert_eq!(
        Cause::KernelWithoutCall { call: Call::PidfdGetfd }.to_string(),
        "the running kernel has no pidfd_getfd, which came with Linux 5.6"
    );
    assert_eq!(Cause::FdLimit { limit: Some(64) }.to_string(), "the process may not open more files (its limit is 64)");
    assert_eq!(
        Cause::Yama { scope: 1 }.remedy().to_string(),
        "Allow processes of one user to look into each other. Run this on the machine itself, not in a container; it lasts until the next boot: \
         `sudo sysctl -w kernel.yama.ptrace_scope=0`"
    );
}

#[test]
fn what_was_not_found_comes_with_all_that_is_known() {
    let mut facts = Facts::of(Failure::Call(Call::PidfdGetfd, EPERM));
    (facts.kernel, facts.yama, facts.on_self) = (KernelVersion::parse("6.1.0-18-amd64"), Some(Yama::Scope(1)), Trial::Works);
    let text = Diagnosis::of(facts).to_string();
    for word in ["was not found", "pidfd_getfd: errno 1", "kernel 6.1", "ptrace_scope 1", "on itself: works", "dumpable: unknown"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn the_other_way_is_named_where_it_was_tried_in_vain() {
    let mut facts = Facts::of(Failure::Call(Call::PidfdGetfd, ENOSYS));
    facts.filtered = Some(false);
    assert_eq!(Diagnosis::of(facts).other_way(), None);
    facts.broker = Some(BrokerFailure::NoListener { socket_dir: false });
    assert!(Diagnosis::of(facts).other_way().unwrap().contains("CUDA_IPC_SOCKET_DIR"));
    assert!(facts.to_string().contains("its broker: nobody listens"), "{facts}");
    facts.broker = Some(BrokerFailure::NoListener { socket_dir: true });
    assert!(Diagnosis::of(facts).other_way().unwrap().contains("neither by name nor in the socket directory"));
    // Another user is the cause where nothing else is proven.
    let mut facts = Facts::of(Failure::Call(Call::PidfdGetfd, EPERM));
    facts.broker = Some(BrokerFailure::UnmappedUser);
    assert_eq!(Diagnosis::of(facts).cause, Cause::OtherUserNamespace);
}

#[test]
fn kernel_releases_are_read() {
    let version = |major, minor| Some(KernelVersion { major, minor });
    for (release, want) in [
        ("6.18.44-fc-v1045\n", version(6, 18)),
        ("5.6", version(5, 6)),
        ("4.4.0", version(4, 4)),
        ("5.10-rc1", version(5, 10)),
        ("6", None),
        ("", None),
        ("linux", None),
        ("99999999.1", None),
    ] {
        assert_eq!(KernelVersion::parse(release), want, "{release}");
    }
}
