//! Settings of a context: the caller's structure, then the environment, then defaults.

use core::ffi::{c_char, c_void};
use core::time::Duration;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use cuda_ipc_cache::{CacheOptions, Environment, WrongVariable};
use cuda_ipc_core::exporter::ExporterOptions;
use cuda_ipc_core::importer::{ConnectOptions, Route};

use crate::failure::Failure;
use crate::log::{self, Log, cuda_ipc_log_fn_t};
use crate::status::{CUDA_IPC_ERR_ARGUMENT, CUDA_IPC_ERR_ENVIRONMENT};

/// Yes, where 0 means the default.
pub const CUDA_IPC_ON: u32 = 1;
/// No, where 0 means the default.
pub const CUDA_IPC_OFF: u32 = 2;

/// By pidfd where the kernel allows that, else by the exporter's broker.
pub const CUDA_IPC_ROUTE_AUTO: u32 = 1;
/// By pidfd only.
pub const CUDA_IPC_ROUTE_PIDFD: u32 = 2;
/// By the broker only.
pub const CUDA_IPC_ROUTE_BROKER: u32 = 3;

/// An import maps nothing; the first lease of a chunk does.
pub const CUDA_IPC_MAP_LAZY: u32 = 1;
/// An import maps what its key names before it returns, and fails where that does.
pub const CUDA_IPC_MAP_EAGER: u32 = 2;

/// A sweep interval that means never.
pub const CUDA_IPC_NEVER: u32 = u32::MAX;

/// Settings of a context. Make one with `cuda_ipc_config_init` and set what is to differ. A field that is 0 is decided by its environment variable, if it has one
/// that is set, otherwise by the default. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types, reason = "its name in C")]
pub struct cuda_ipc_config_t {
    /// sizeof of this structure.
    pub size: usize,
    /// Receives log lines; null for none. The function and `log_user` are used until the context is destroyed and no call of it runs any more.
    pub log: cuda_ipc_log_fn_t,
    /// Handed to `log` as it is.
    pub log_user: *mut c_void,
    /// `CUDA_IPC_LOG_*`: the most that is said. CUDA_IPC_LOG=off|error|warn|info|debug; default: warn. Without a function, lines go to standard error if
    /// CUDA_IPC_LOG is set, otherwise nowhere.
    pub log_level: i32,
    /// `CUDA_IPC_ROUTE_*`: how exporters are reached. CUDA_IPC_ROUTE=auto|pidfd|broker; default: auto.
    pub route: u32,
    /// `CUDA_IPC_ON` or `CUDA_IPC_OFF`: whether importers that may not fetch this process's fds can ask a thread of the library for them.
    /// CUDA_IPC_BROKER=y|n; default: on.
    pub broker: u32,
    /// `CUDA_IPC_ON`: lets every process of this user trace this one (PR_SET_PTRACER), which Yama's scope 1 wants for the route by pidfd between processes
    /// that are no relatives. Opens more than this library needs, so it is never done unasked. CUDA_IPC_PTRACER=any|none; default: off.
    pub ptracer: u32,
    /// `CUDA_IPC_MAP_*`. CUDA_IPC_MAP=eager|lazy; default: lazy.
    pub map: u32,
    /// `CUDA_IPC_ON` or `CUDA_IPC_OFF`: whether a thread of the library unmaps what exporters have freed and dead exporters have left. If not, `cuda_ipc_trim`
    /// is the caller's to call. Default: on.
    pub importer_sweeps: u32,
    /// How often a thread of the library looks for exported memory that was freed without `cuda_ipc_retire`, in milliseconds; `CUDA_IPC_NEVER`: never, then
    /// `cuda_ipc_sweep` is the caller's to call. Default: 100.
    pub exporter_sweep_ms: u32,
    /// `CUDA_IPC_ON` or `CUDA_IPC_OFF`: whether imported chunks stay mapped after their last lease. Default: on.
    pub keep_idle: u32,
    /// Windows that may keep address space while they are idle. CUDA_IPC_CACHE_MAX_WINDOWS; default: 4096.
    pub cache_max_windows: u64,
    /// Bytes that may stay mapped while they are idle. CUDA_IPC_CACHE_MAX_SIZE, with k, m, g or t for powers of 1024; default: 1t.
    pub cache_max_size: u64,
    /// Bytes of address space that all windows may reserve. Default: 64 TiB.
    pub cache_max_address_space: u64,
    /// File descriptors of the soft RLIMIT_NOFILE that the exporter leaves to the application; chunks past the rest go by the broker. Default: 256.
    pub fd_reserve: u64,
    /// Folder for the broker's socket file, for processes in other network namespaces; made if it is not there. Copied. CUDA_IPC_SOCKET_DIR; default: none.
    pub socket_dir: *const c_char,
    /// Users besides this process's own that are served and believed, as this user namespace numbers them. Copied. Default: none.
    pub allowed_uids: *const u32,
    /// How many there are.
    pub allowed_uid_count: usize,
}

/// Settings, decided.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) log: Log,
    pub(crate) eager: bool,
    pub(crate) ptracer: bool,
    pub(crate) exporter: ExporterOptions,
    pub(crate) cache: CacheOptions,
}

/// What the caller's structure points to, copied.
#[derive(Debug, Default)]
pub(crate) struct Pointed {
    pub(crate) socket_dir: Option<Vec<u8>>,
    pub(crate) allowed_uids: Vec<u32>,
}

impl Settings {
    /// Decides each setting.
    ///
    /// Errors: `CUDA_IPC_ERR_ARGUMENT` names the field, `CUDA_IPC_ERR_ENVIRONMENT` the variable, whose value is not taken.
    pub(crate) fn new(config: &cuda_ipc_config_t, pointed: Pointed, env: impl Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        let env = Environment::new(env);
        let asked = env.value("CUDA_IPC_LOG").is_some();
        let level = match config.log_level {
            0 => env.word(
                "CUDA_IPC_LOG",
                &[
                    ("off", log::CUDA_IPC_LOG_OFF),
                    ("error", log::CUDA_IPC_LOG_ERROR),
                    ("warn", log::CUDA_IPC_LOG_WARN),
                    ("info", log::CUDA_IPC_LOG_INFO),
                    ("debug", log::CUDA_IPC_LOG_DEBUG),
                ],
            )?,
            level @ log::CUDA_IPC_LOG_OFF..=log::CUDA_IPC_LOG_DEBUG => Some(level),
            _ => return Err(argument("log_level")),
        };
        let route = match config.route {
            0 => env.route()?,
            CUDA_IPC_ROUTE_AUTO => Some(Route::Auto),
            CUDA_IPC_ROUTE_PIDFD => Some(Route::Pidfd),
            CUDA_IPC_ROUTE_BROKER => Some(Route::Broker),
            _ => return Err(argument("route")),
        };
        let eager = match config.map {
            0 => env.eager()?,
            CUDA_IPC_MAP_EAGER => Some(true),
            CUDA_IPC_MAP_LAZY => Some(false),
            _ => return Err(argument("map")),
        };
        let broker = switch(config.broker, "broker")?.map_or_else(|| env.broker(), |on| Ok(Some(on)))?;
        let ptracer = switch(config.ptracer, "ptracer")?.map_or_else(|| env.ptracer(), |on| Ok(Some(on)))?;
        let socket_dir = match pointed.socket_dir {
            Some(path) if path.is_empty() => return Err(argument("socket_dir")),
            Some(path) => Some(PathBuf::from(OsString::from_vec(path))),
            None => env.socket_dir(),
        };
        let max_windows = if config.cache_max_windows == 0 { env.max_windows()? } else { Some(config.cache_max_windows) };
        let max_mapped_bytes = if config.cache_max_size == 0 { env.max_mapped_bytes()? } else { Some(config.cache_max_size) };

        let mut exporter = ExporterOptions::default();
        match config.exporter_sweep_ms {
            0 => {}
            CUDA_IPC_NEVER => exporter.sweep_interval = None,
            interval => exporter.sweep_interval = Some(Duration::from_millis(interval.into())),
        }
        set(&mut exporter.broker, broker);
        set(&mut exporter.fd_reserve, (config.fd_reserve != 0).then_some(config.fd_reserve));
        exporter.socket_dir.clone_from(&socket_dir);
        exporter.allowed_uids.clone_from(&pointed.allowed_uids);

        let mut cache = CacheOptions::default();
        set(&mut cache.max_windows, max_windows);
        set(&mut cache.max_mapped_bytes, max_mapped_bytes);
        set(&mut cache.max_address_space, (config.cache_max_address_space != 0).then_some(config.cache_max_address_space));
        set(&mut cache.sweep, switch(config.importer_sweeps, "importer_sweeps")?);
        set(&mut cache.keep_idle, switch(config.keep_idle, "keep_idle")?);
        let mut connect = ConnectOptions::default();
        set(&mut connect.route, route);
        connect.socket_dir = socket_dir;
        connect.allowed_uids = pointed.allowed_uids;
        cache.connect = connect;

        Ok(Self {
            log: Log::new(level.unwrap_or(log::CUDA_IPC_LOG_WARN), config.log, config.log_user, asked),
            eager: eager.unwrap_or(false),
            ptracer: ptracer.unwrap_or(false),
            exporter,
            cache,
        })
    }
}

/// Keeps the default where nothing else is wanted.
fn set<T>(option: &mut T, wanted: Option<T>) {
    if let Some(wanted) = wanted {
        *option = wanted;
    }
}

fn switch(value: u32, field: &'static str) -> Result<Option<bool>, Failure> {
    match value {
        0 => Ok(None),
        CUDA_IPC_ON => Ok(Some(true)),
        CUDA_IPC_OFF => Ok(Some(false)),
        _ => Err(argument(field)),
    }
}

const fn argument(field: &'static str) -> Failure {
    Failure::about(CUDA_IPC_ERR_ARGUMENT, field)
}

impl From<WrongVariable> for Failure {
    fn from(wrong: WrongVariable) -> Self {
        Self::about(CUDA_IPC_ERR_ENVIRONMENT, wrong.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn zeros() -> cuda_ipc_config_t {
        cuda_ipc_config_t {
            size: size_of::<cuda_ipc_config_t>(),
            log: None,
            log_user: core::ptr::null_mut(),
            log_level: 0,
            route: 0,
            broker: 0,
            ptracer: 0,
            map: 0,
            importer_sweeps: 0,
            exporter_sweep_ms: 0,
            keep_idle: 0,
            cache_max_windows: 0,
            cache_max_size: 0,
            cache_max_address_space: 0,
            fd_reserve: 0,
            socket_dir: core::ptr::null(),
            allowed_uids: core::ptr::null(),
            allowed_uid_count: 0,
        }
    }

    fn decide(config: &cuda_ipc_config_t, env: &[(&str, &str)]) -> Result<Settings, Failure> {
        let env: HashMap<&str, &str> = env.iter().copied().collect();
        Settings::new(config, Pointed::default(), |name| env.get(name).map(OsString::from))
    }

    #[test]
    fn zeros_are_the_defaults_of_the_layers_below() {
        let settings = decide(&zeros(), &[]).expect("defaults");
        assert_eq!((settings.exporter, settings.cache), (ExporterOptions::default(), CacheOptions::default()));
        assert!(!settings.eager && !settings.ptracer);
        // An empty variable is none.
        assert_eq!(decide(&zeros(), &[("CUDA_IPC_ROUTE", "")]).expect("defaults").cache, CacheOptions::default());
    }

    #[test]
    fn the_environment_decides_what_the_caller_does_not() {
        let env = [
            ("CUDA_IPC_ROUTE", "broker"),
            ("CUDA_IPC_BROKER", "n"),
            ("CUDA_IPC_SOCKET_DIR", "some/dir"),
            ("CUDA_IPC_PTRACER", "any"),
            ("CUDA_IPC_MAP", "Eager"),
            ("CUDA_IPC_CACHE_MAX_WINDOWS", "7"),
            ("CUDA_IPC_CACHE_MAX_SIZE", "3g"),
        ];
        let settings = decide(&zeros(), &env).expect("good values");
        assert_eq!((settings.eager, settings.ptracer, settings.exporter.broker), (true, true, false));
        assert_eq!(settings.exporter.socket_dir, Some(PathBuf::from("some/dir")));
        assert_eq!(settings.cache.connect.socket_dir, Some(PathBuf::from("some/dir")));
        assert_eq!(settings.cache.connect.route, Route::Broker);
        assert_eq!((settings.cache.max_windows, settings.cache.max_mapped_bytes), (7, 3 << 30));

        let mut config = zeros();
        config.route = CUDA_IPC_ROUTE_PIDFD;
        config.broker = CUDA_IPC_ON;
        config.ptracer = CUDA_IPC_OFF;
        config.map = CUDA_IPC_MAP_LAZY;
        config.cache_max_windows = 8;
        config.cache_max_size = 4096;
        let settings = decide(&config, &env).expect("good values");
        assert_eq!((settings.eager, settings.ptracer, settings.exporter.broker), (false, false, true));
        assert_eq!(settings.cache.connect.route, Route::Pidfd);
        assert_eq!((settings.cache.max_windows, settings.cache.max_mapped_bytes), (8, 4096));
    }

    #[test]
    fn what_is_not_taken_is_named() {
        for (name, value) in [
            ("CUDA_IPC_LOG", "loud"),
            ("CUDA_IPC_ROUTE", "post"),
            ("CUDA_IPC_BROKER", "maybe"),
            ("CUDA_IPC_PTRACER", "y"),
            ("CUDA_IPC_MAP", "later"),
            ("CUDA_IPC_CACHE_MAX_WINDOWS", "0"),
            ("CUDA_IPC_CACHE_MAX_SIZE", "-1"),
            ("CUDA_IPC_CACHE_MAX_SIZE", "99999999t"),
            ("CUDA_IPC_CACHE_MAX_SIZE", "g"),
        ] {
            let failure = decide(&zeros(), &[(name, value)]).expect_err(value);
            assert_eq!(failure.status, CUDA_IPC_ERR_ENVIRONMENT, "{name}={value}");
            assert!(failure.to_string().contains(name));
        }
        for (field, change) in [
            ("route", (|config| config.route = 9) as fn(&mut cuda_ipc_config_t)),
            ("broker", |config| config.broker = 3),
            ("ptracer", |config| config.ptracer = 3),
            ("map", |config| config.map = 3),
            ("log_level", |config| config.log_level = -1),
            ("importer_sweeps", |config| config.importer_sweeps = 7),
            ("keep_idle", |config| config.keep_idle = 7),
        ] {
            let mut config = zeros();
            change(&mut config);
            let failure = decide(&config, &[]).expect_err(field);
            assert_eq!((failure.status, failure.to_string().starts_with(field)), (CUDA_IPC_ERR_ARGUMENT, true), "{field}");
        }
    }
}
