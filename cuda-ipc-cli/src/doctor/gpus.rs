//! The driver and its devices, by trial.

use cuda_driver_sys::CUresult;
use cuda_ipc_core::sys::driver::{Cuda, OpenError};
use serde::Serialize;

use crate::finding::Finding;
use crate::gpu::{DriverKind, Gpu, GpuFacts, Trials};

/// The driver, or why there is none.
#[derive(Serialize)]
pub(super) struct Gpus {
    /// Why there is no usable driver.
    pub(super) error: Option<String>,
    pub(super) devices: Vec<Device>,
}

#[derive(Serialize)]
pub(super) struct Device {
    pub(super) ordinal: u32,
    /// Why it could not be opened.
    pub(super) error: Option<String>,
    #[serde(flatten)]
    pub(super) facts: Option<GpuFacts>,
    pub(super) trials: Option<Trials>,
}

impl Gpus {
    pub(super) fn look() -> Self {
        let counted = match Cuda::open() {
            Ok(cuda) => cuda.device_count().map_err(|error| error.to_string()),
            // A driver without a device is one.
            Err(OpenError::Init(error)) if error.code == CUresult::CUDA_ERROR_NO_DEVICE.0 => Ok(0),
            Err(error) => Err(error.to_string()),
        };
        match counted {
            Ok(count) => Self { error: None, devices: (0..count.cast_unsigned()).map(Device::look).collect() },
            Err(error) => Self { error: Some(error), devices: Vec::new() },
        }
    }

    pub(super) fn kind(&self) -> Option<DriverKind> {
        self.devices.iter().find_map(|device| device.facts.as_ref()).map(|facts| facts.driver)
    }

    /// What keeps memory of the devices from being shared.
    pub(super) fn finding(&self) -> Option<Finding> {
        if let Some(error) = &self.error {
            return Some(Finding::new(
                "no-driver",
                format!("there is no usable CUDA driver: {error}"),
                "Install NVIDIA's driver, or give the container its GPUs",
                &["nvidia-smi -L", "docker run --gpus all ..."],
            ));
        }
        if self.devices.is_empty() {
            return Some(Finding::new(
                "no-gpu",
                "the driver shows no GPU to this process",
                "Let the process see a GPU",
                &["unset CUDA_VISIBLE_DEVICES", "nvidia-smi -L", "docker run --gpus all ..."],
            ));
        }
        let device = self.devices.iter().find(|device| !device.shares_by_fd())?;
        let error = device.error.as_deref().or_else(|| device.trials.as_ref()?.posix_fd.error.as_deref()).unwrap_or("unknown");
        Some(Finding::new(
            "gpu-shares-nothing",
            format!("memory of GPU {} cannot be shared by file descriptors: {error}", device.ordinal),
            "Look whether the GPU is healthy, has free memory, and is not of a kind that cannot share (vGPU, WSL)",
            &["nvidia-smi"],
        ))
    }
}

impl Device {
    fn look(ordinal: u32) -> Self {
        let opened = Gpu::open(ordinal).and_then(|gpu| Ok((gpu.facts()?, Trials::on(&gpu))));
        match opened {
            Ok((facts, trials)) => Self { ordinal, error: None, facts: Some(facts), trials: Some(trials) },
            Err(failure) => Self { ordinal, error: Some(failure.first_line()), facts: None, trials: None },
        }
    }

    pub(super) fn shares_by_fd(&self) -> bool {
        self.trials.as_ref().is_some_and(|trials| trials.posix_fd.works)
    }
}
