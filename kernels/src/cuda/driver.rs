#![allow(unsafe_code, reason = "calls libcuda")]
//! The driver and its GPUs.

use std::{
    ffi::{CStr, c_char, c_int},
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute as Attribute};

use super::{
    api::{self, Api},
    device::CudaDevice,
    error::{CudaError, ErrorCode},
    report::{DeviceReport, WritesOrdering},
};

/// CUDA 12.0: the oldest driver accepted. The PTX may need a newer one.
const VERSION_MIN: i32 = 12_000;

/// The open devices of this process, by ordinal.
static OPENED: Mutex<Vec<(u32, Weak<CudaDevice>)>> = Mutex::new(Vec::new());

/// The NVIDIA driver.
#[derive(Clone, Copy)]
pub struct CudaDriver {
    api: &'static Api,
    version: i32,
    devices: u32,
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("version", &self.version)
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

impl CudaDriver {
    /// Loads and initialises libcuda.
    ///
    /// # Errors
    /// Returns [`CudaError::NoLibrary`], [`CudaError::OldDriver`], [`CudaError::NoDevice`], or the
    /// error of cuInit.
    pub fn load() -> Result<Self, CudaError> {
        let api = api::load()?;
        // SAFETY: the first call of all; it may be repeated.
        match unsafe { (api.cuInit)(0) } {
            ErrorCode::NO_DEVICE => return Err(CudaError::NoDevice),
            code => api.check("starting the NVIDIA driver", "cuInit", code)?,
        }
        let mut version: c_int = 0;
        // SAFETY: writes one number.
        let code = unsafe { (api.cuDriverGetVersion)(&raw mut version) };
        api.check("asking the driver's version", "cuDriverGetVersion", code)?;
        if version < VERSION_MIN {
            let lacks = "what came with CUDA 12.0".into();
            return Err(CudaError::OldDriver { found: api::version_text(version), lacks });
        }
        let mut count: c_int = 0;
        // SAFETY: writes one number.
        let code = unsafe { (api.cuDeviceGetCount)(&raw mut count) };
        api.check("counting GPUs", "cuDeviceGetCount", code)?;
        match u32::try_from(count) {
            Ok(0) | Err(_) => Err(CudaError::NoDevice),
            Ok(devices) => Ok(Self { api, version, devices }),
        }
    }

    /// Returns the CUDA version that the driver implements: 13000 is CUDA 13.0.
    #[must_use]
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// Sets environment variables that the driver reads when it starts, unless the user set them:
    ///
    /// - `CUDA_MODULE_LOADING=EAGER`: loads kernels when they are compiled, not at their first
    ///   launch, which may wait for running kernels; a resident kernel does not end.
    /// - `CUDA_DEVICE_MAX_CONNECTIONS=32`: the maximum number of hardware queues. Streams that
    ///   share one wait for each other, even if nothing orders them.
    ///
    /// # Safety
    /// No other thread accesses the environment during the call: call it first in `main`.
    pub unsafe fn set_environment() {
        for (name, value) in
            [("CUDA_MODULE_LOADING", "EAGER"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")]
        {
            if std::env::var_os(name).is_none() {
                // SAFETY: the caller's promise.
                unsafe { std::env::set_var(name, value) };
            }
        }
    }

    /// Same as [`CudaDriver::device`], for the GPU at a PCI address: another process may give its
    /// GPUs other numbers.
    ///
    /// # Errors
    /// Returns [`CudaError::Argument`] if this process does not see it, or [`CudaError::Call`].
    pub fn device_at(&self, pci: &str) -> Result<Arc<CudaDevice>, CudaError> {
        let mut seen = Vec::new();
        for ordinal in 0..self.devices {
            let what = || format!("looking for GPU {pci}");
            let mut device: CUdevice = 0;
            // SAFETY: writes one number.
            let code = unsafe { (self.api.cuDeviceGet)(&raw mut device, ordinal as c_int) };
            self.api.check(what(), "cuDeviceGet", code)?;
            let report = describe(self.api, device, ordinal, self.version)?;
            if report.pci == pci {
                return self.device(ordinal);
            }
            seen.push(report.pci);
        }
        Err(CudaError::Argument(format!(
            "GPU {pci} was asked for, and this process sees {}: start it with that GPU visible \
             (CUDA_VISIBLE_DEVICES)",
            seen.join(", ")
        )))
    }

    /// Retains the primary context of GPU `ordinal`, which the CUDA runtime (an engine) also uses.
    /// While the device lives, every call returns the same one: calls that must not run beside a
    /// kernel depend on a count of all started executors.
    ///
    /// # Errors
    /// Returns [`CudaError::NoSuchDevice`] or [`CudaError::Call`].
    pub fn device(&self, ordinal: u32) -> Result<Arc<CudaDevice>, CudaError> {
        let (api, count) = (self.api, self.devices);
        let wanted = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let wanted = wanted.ok_or(CudaError::NoSuchDevice { ordinal, count })?;
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|(_, device)| device.strong_count() > 0);
        let same = opened.iter().find(|(other, _)| *other == ordinal);
        if let Some(device) = same.and_then(|(_, device)| device.upgrade()) {
            return Ok(device);
        }
        let what = || format!("opening GPU {ordinal}");
        let mut device: CUdevice = 0;
        // SAFETY: writes one number.
        let code = unsafe { (api.cuDeviceGet)(&raw mut device, wanted) };
        api.check(what(), "cuDeviceGet", code)?;
        let report = describe(api, device, ordinal, self.version)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: writes one handle, which Drop releases.
        let code = unsafe { (api.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        api.check(what(), "cuDevicePrimaryCtxRetain", code)?;
        tracing::debug!(%report, "GPU opened");
        let device = Arc::new(CudaDevice::new(api, device, context, report));
        opened.push((ordinal, Arc::downgrade(&device)));
        Ok(device)
    }
}

/// Default number of hardware queues that streams share.
const CONNECTIONS: u32 = 8;

/// Checks that there are enough hardware queues for a resident kernel, according to the
/// environment. Streams that share one wait for each other even if nothing orders them: with too
/// few, work that the kernel waits for could be queued behind the kernel.
pub(super) fn enough_connections() -> Result<(), CudaError> {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    // CUDA read the variable when it started, and does not report the value in use.
    let found = std::env::var(NAME).ok().and_then(|text| text.parse().ok()).unwrap_or(CONNECTIONS);
    if found >= CONNECTIONS {
        return Ok(());
    }
    Err(CudaError::Argument(format!(
        "a resident kernel needs {CONNECTIONS} hardware queues or more, and {NAME} is {found} in \
         the environment of this process (CUDA does not say how many it has): what the kernel \
         waits for could be behind it in the same queue; set {NAME}=32 before CUDA starts, or \
         launch per batch"
    )))
}

/// Queries all fields of a report.
fn describe(
    api: &Api,
    device: CUdevice,
    ordinal: u32,
    driver_version: i32,
) -> Result<DeviceReport, CudaError> {
    let what = || format!("describing GPU {ordinal}");
    let get = |attribute: Attribute| {
        let mut value: c_int = 0;
        // SAFETY: writes one number.
        let code = unsafe { (api.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
        api.check(what(), "cuDeviceGetAttribute", code).map(|()| value)
    };
    let mut name = [0 as c_char; 128];
    // SAFETY: writes at most that many characters, including a terminating 0.
    let code = unsafe { (api.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, device) };
    api.check(what(), "cuDeviceGetName", code)?;
    // SAFETY: the last character is always 0.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(DeviceReport {
        ordinal,
        name,
        pci: format!(
            "{:04x}:{:02x}:{:02x}",
            get(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
        ),
        driver_version,
        capability: (
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sms: u32::try_from(get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?).unwrap_or(0),
        host_register: get(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)? != 0,
        writes_ordering: WritesOrdering::new(
            // Older drivers do not know the attribute.
            get(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING).unwrap_or(-1),
        ),
        flush_remote_writes: get(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)
            .is_ok_and(|value| value != 0),
        is_coherent: get(
            Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
        )
        .is_ok_and(|value| value != 0),
    })
}
