//! Ways to an exporter, and which of them may be taken.

use core::fmt;
use core::str::FromStr;
use std::path::PathBuf;

/// How an importer gets fds of an exporter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// By pidfd where that is allowed, else by the exporter's broker.
    #[default]
    Auto,
    /// By pidfd_getfd(2) only.
    Pidfd,
    /// By the broker only.
    Broker,
}

impl Route {
    /// Its name, which [`Route::from_str`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Pidfd => "pidfd",
            Self::Broker => "broker",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A word that is no route's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownRoute;

impl fmt::Display for UnknownRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a route is auto, pidfd or broker")
    }
}

impl core::error::Error for UnknownRoute {}

impl FromStr for Route {
    type Err = UnknownRoute;

    fn from_str(name: &str) -> Result<Self, UnknownRoute> {
        [Self::Auto, Self::Pidfd, Self::Broker].into_iter().find(|route| route.name() == name).ok_or(UnknownRoute)
    }
}

/// Settings for reaching an exporter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// The ways that may be taken.
    pub route: Route,
    /// The directory in which exporters have the files of their sockets, for exporters in other network namespaces.
    pub socket_dir: Option<PathBuf>,
    /// Users besides this process's own whose exporters are believed, as this user namespace numbers them.
    pub allowed_uids: Vec<u32>,
    /// Whether a key of this very process is reached like any other, instead of being an error that says to use the pointer itself.
    pub own_keys: bool,
}

impl ConnectOptions {
    /// These, with another route.
    #[must_use]
    pub fn with_route(self, route: Route) -> Self {
        Self { route, ..self }
    }
}
