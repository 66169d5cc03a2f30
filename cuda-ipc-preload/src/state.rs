//! What there is once for the process: the driver, and the two sides. Made at UCX's first interposed call, never dropped.

use std::sync::OnceLock;

use cuda_ipc_core::sys::driver::Cuda;
use cuda_ipc_core::sys::spawn_quiet;

use crate::callers;
use crate::exporting::Exporting;
use crate::importing::Importing;
use crate::{bypass, explain, report, ucm};

/// See the module's documentation.
pub(crate) struct State {
    pub(crate) exporting: Exporting,
    pub(crate) importing: Importing,
}

static STATE: OnceLock<Option<State>> = OnceLock::new();

/// The state; `None` where there is no driver to build on. Then every answer is the driver's own.
pub(crate) fn state() -> Option<&'static State> {
    STATE
        .get_or_init(|| {
            callers::pin();
            let opened = Cuda::open();
            let opened = opened.inspect_err(|error| report::warn(report::Cause::NoDriver, &format_args!("{error}")));
            // In a thread of its own: this may be a call from inside one of UCM's callbacks, under the lock that registering another one waits for.
            if spawn_quiet("cuda-ipc-ucm", ucm::listen).is_err() {
                ucm::do_not_wait();
            }
            explain::begin();
            report::info(&format_args!("UCX's CUDA module is used in process {}, and its calls come here", std::process::id()));
            bypass::foretell();
            opened.ok().map(|cuda| State { exporting: Exporting::new(cuda), importing: Importing::new(cuda) })
        })
        .as_ref()
}

/// The state if it has been made already.
pub(crate) fn made() -> Option<&'static State> {
    STATE.get()?.as_ref()
}
