//! The report as people read it.

use core::fmt::{self, Display};

use super::gpus::Device;
use super::process::Process;
use super::routes::Way;
use super::{Lane, Report};
use crate::finding::Finding;
use crate::gpu::DriverKind;

/// A name and what it stands for.
fn line(f: &mut fmt::Formatter<'_>, name: &str, value: impl Display) -> fmt::Result {
    writeln!(f, "  {name:24}{value}")
}

fn known<T: Display>(value: Option<T>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

fn whether(value: Option<bool>) -> &'static str {
    match value {
        Some(true) => "yes",
        Some(false) => "no",
        None => "unknown",
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.gpus(f)?;
        self.node(f)?;
        self.ucx(f)?;
        if let Some(process) = &self.process {
            process.fmt(f)?;
        }
        self.routes(f)?;
        self.verdict(f)
    }
}

impl Report {
    fn gpus(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "GPUs")?;
        match (&self.gpus.error, self.gpus.kind()) {
            (Some(error), _) => line(f, "driver", format_args!("none: {error}"))?,
            (None, Some(DriverKind::Fake)) => line(f, "driver", "the fake driver, for tests: there is no GPU behind it")?,
            (None, Some(DriverKind::Cuda)) => line(f, "driver", "NVIDIA's")?,
            (None, None) => line(f, "driver", "there, and shows no GPU that can be opened")?,
        }
        self.gpus.devices.iter().try_for_each(|device| device.fmt(f))
    }

    fn node(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = &self.node;
        writeln!(f, "Kernel and gates")?;
        line(f, "kernel", known(node.kernel.as_ref()))?;
        line(
            f,
            "system call filter",
            match node.seccomp {
                Some(true) => "yes (seccomp), as in containers",
                Some(false) => "none",
                None => "unknown",
            },
        )?;
        line(
            f,
            "Yama ptrace_scope",
            match node.yama_ptrace_scope {
                Some(-1) => "no Yama in this kernel".to_owned(),
                scope => known(scope),
            },
        )?;
        line(f, "user", node.uid)?;
        line(f, "CAP_SYS_PTRACE", whether(node.cap_sys_ptrace))?;
        let limit = |limit: Option<u64>| limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
        line(f, "open files", format_args!("{} (may be raised to {})", limit(node.open_files_soft), limit(node.open_files_hard)))?;
        line(
            f,
            "namespaces",
            format_args!(
                "PID {}, user {}, network {}",
                known(node.pid_namespace),
                known(node.user_namespace),
                known(node.network_namespace)
            ),
        )?;
        line(f, "socket directory", node.socket_dir.as_deref().unwrap_or("none (CUDA_IPC_SOCKET_DIR is not set)"))
    }

    fn ucx(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "UCX of the {}", self.ucx.searched)?;
        if self.ucx.libraries.is_empty() {
            line(f, "CUDA module", "none found")?;
        }
        for library in &self.ucx.libraries {
            line(f, "CUDA module", &library.path)?;
            match (library.has_arm, &library.error) {
                (Some(true), _) => line(f, "", "built with the POSIX_FD arm")?,
                (Some(false), _) => line(f, "", "built without the POSIX_FD arm: needs the preload library")?,
                (None, error) => line(f, "", format_args!("cannot be read: {}", error.as_deref().unwrap_or("unknown")))?,
            }
        }
        for wheel in &self.ucx.wheels {
            line(f, "Python wheel", format_args!("{} {}", wheel.name, wheel.version))?;
        }
        match &self.ucx.python_error {
            Some(error) => line(f, "Python", format_args!("not asked: {error}")),
            None => Ok(()),
        }
    }

    fn routes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let routes = &self.routes;
        writeln!(f, "Ways for file descriptors")?;
        way(f, "pidfd", Some(&routes.pidfd))?;
        way(f, "broker, by name", Some(&routes.broker_name))?;
        way(f, "broker, by file", routes.broker_file.as_ref())
    }

    fn verdict(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let towards = self.process.as_ref().map_or_else(String::new, |process| format!(" towards process {}", process.pid));
        writeln!(f)?;
        match self.lane {
            Lane::Available => writeln!(f, "The lane is available{towards}.")?,
            Lane::Degraded if !self.routes.pidfd.works => {
                writeln!(f, "The lane is degraded{towards}: exporters hand their memory over by their brokers, the direct way is closed.")?
            }
            Lane::Degraded => writeln!(f, "The lane is degraded{towards}: it is there, with what is said below.")?,
            Lane::None => writeln!(f, "There is no lane{towards}.")?,
        }
        for finding in &self.findings {
            writeln!(f, "  [{}] {finding}", finding.cause)?;
            writeln!(f, "    {}.", finding.remedy)?;
            finding.commands.iter().try_for_each(|command| writeln!(f, "        {command}"))?;
        }
        Ok(())
    }
}

fn way(f: &mut fmt::Formatter<'_>, name: &str, way: Option<&Way>) -> fmt::Result {
    match way {
        None => line(f, name, "not tried: there is no socket directory"),
        Some(Way { finding: Some(Finding { cause, .. }), .. }) => line(f, name, format_args!("no [{cause}]")),
        Some(_) => line(f, name, "works"),
    }
}

impl Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = format!("GPU {}", self.ordinal);
        let (Some(facts), Some(trials)) = (&self.facts, &self.trials) else {
            return line(f, &name, format_args!("cannot be opened: {}", self.error.as_deref().unwrap_or("unknown")));
        };
        line(f, &name, format_args!("{}, {}", facts.gpu, facts.gpu_uuid))?;
        let version = facts.driver_version.as_deref().map_or_else(String::new, |version| format!(", driver {version}"));
        line(f, "", format_args!("CUDA {}{version}", facts.cuda_version))?;
        for (what, trial) in [("POSIX fd", &trials.posix_fd), ("fabric handle", &trials.fabric), ("legacy IPC", &trials.legacy)] {
            let promised = match (trial.promised, trial.works) {
                (Some(true), false) => " (although its attribute says yes)",
                (Some(false), true) => " (although its attribute says no)",
                _ => "",
            };
            let outcome = match &trial.error {
                None => "works".to_owned(),
                Some(error) => format!("no: {error}"),
            };
            line(f, "", format_args!("{what}: {outcome}{promised}"))?;
        }
        Ok(())
    }
}

impl Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Process {}", self.pid)?;
        if !self.exists {
            return line(f, "exists", "no");
        }
        line(f, "name", known(self.name.as_ref()))?;
        line(f, "same user and group", whether(self.same_user_and_group))?;
        line(f, "dumpable", whether(self.dumpable))?;
        line(f, "same PID namespace", whether(self.same_pid_namespace))?;
        line(f, "same user namespace", whether(self.same_user_namespace))?;
        line(f, "same network namespace", whether(self.same_network_namespace))?;
        line(f, "reachable by pidfd", whether(Some(self.reachable_by_pidfd)))?;
        line(f, "broker", self.broker.as_deref().unwrap_or("none seen: nothing exported yet, switched off, or not to be seen from here"))?;
        line(
            f,
            "preload library",
            match self.preload_active {
                Some(true) => "active",
                Some(false) => "not active",
                None => "unknown: this process may not look",
            },
        )
    }
}
