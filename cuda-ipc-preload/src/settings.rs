//! What the environment decides: how peers are reached, what is mapped when, and what may be kept. A value that is not taken is named once, and is as good as none.

use std::sync::OnceLock;

use cuda_ipc_cache::{CacheOptions, Environment, WrongVariable};
use cuda_ipc_core::exporter::ExporterOptions;

use crate::report;

/// The settings of this process.
pub(crate) struct Settings {
    pub(crate) exporter: ExporterOptions,
    pub(crate) cache: CacheOptions,
    /// Whether an import maps what the exporter has, since UCX may hand pointers to kernels; otherwise one chunk, as a proof of the route.
    pub(crate) eager: bool,
}

/// The settings, read at the first call.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let env = Environment::new(|name: &str| std::env::var_os(name));
        let mut exporter = ExporterOptions::default();
        let mut cache = CacheOptions::default();
        // UCX has asked to import, and does not know whose key it is; so one of this process gets a window, too.
        cache.connect.own_keys = true;
        set(&mut cache.connect.route, env.route());
        set(&mut cache.max_windows, env.max_windows());
        set(&mut cache.max_mapped_bytes, env.max_mapped_bytes());
        cache.connect.socket_dir = env.socket_dir();
        exporter.socket_dir = env.socket_dir();
        set(&mut exporter.broker, env.broker());
        let mut eager = true;
        set(&mut eager, env.eager());
        Settings { exporter, cache, eager }
    })
}

/// Keeps the default where nothing else is wanted, or what is wanted is not understood.
fn set<T>(option: &mut T, wanted: Result<Option<T>, WrongVariable>) {
    match wanted {
        Ok(Some(wanted)) => *option = wanted,
        Ok(None) => {}
        Err(wrong) => report::warn(report::Cause::Setting, &format_args!("{wrong}, so its default holds")),
    }
}
