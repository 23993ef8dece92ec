//! Where a model runs: the host or a CUDA device, chosen and opened.

mod limits;

use std::fmt;

use graph::{CudaOptions, Device, host::HostOptions};
use kernels::numerics::ElementType;
use kernels::weight::Order;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::weights::{TablePlace, WeightForm};

/// Where an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The host device.
    Host,
    /// A CUDA device, by its number in the driver's order.
    Cuda(usize),
}

impl Place {
    /// The first CUDA device if there is one and it runs `element`, or else the host; and why.
    pub fn best(element: ElementType) -> (Place, String) {
        if element == ElementType::F32 {
            return (Place::Host, "f32 runs on the host device only".into());
        }
        match Device::cuda_count() {
            Ok(0) => (Place::Host, "the CUDA driver shows no device".into()),
            Ok(count) => (Place::Cuda(0), format!("the first of {count} that the CUDA driver shows")),
            Err(error) => (Place::Host, error.to_string()),
        }
    }

    /// What code for it is compiled for, such as `sm_90a`; or `host`.
    ///
    /// # Errors
    /// The device, or its driver, is missing or too old.
    pub fn architecture(self) -> Result<String, Error> {
        Ok(match self {
            Place::Host => "host".into(),
            Place::Cuda(ordinal) => match Device::cuda(ordinal)? {
                Device::Cuda(cuda) => cuda.architecture().to_owned(),
                Device::Host(_) => unreachable!("a CUDA device was asked for"),
            },
        })
    }

    /// Where the other rank runs that is started on this host: on the next device.
    ///
    /// # Errors
    /// There is none.
    pub fn next(self) -> Result<Place, Error> {
        let Place::Cuda(ordinal) = self else { return Ok(self) };
        match Device::cuda_count()? {
            count if ordinal + 1 < count => Ok(Place::Cuda(ordinal + 1)),
            count => Err(Error::Setting(format!(
                "--tp 2 on {self}: rank 1 would run on cuda:{}, and the CUDA driver shows {count} devices; start each rank                  on a host of its own with --rank and --leader, or use --device host",
                ordinal + 1
            ))),
        }
    }

    /// The form that a model's weights have there.
    pub fn form(self, element: ElementType, table: TablePlace) -> WeightForm {
        let order = match self {
            Place::Host => Order::Rows,
            Place::Cuda(_) => Order::Tiles,
        };
        WeightForm { table, ..WeightForm::new(element, order) }
    }

    /// Rows of the longest prompt piece, unless asked otherwise: enough that a mixture's weights are read for many
    /// rows at once, and few enough that a decode round waits for a fraction of a second at most.
    pub fn piece_rows(self) -> u32 {
        match self {
            Place::Host => 512,
            Place::Cuda(_) => 1024,
        }
    }

    /// Whether a model of this element type runs there.
    ///
    /// # Errors
    /// It does not: what to ask for instead.
    pub fn runs(self, element: ElementType) -> Result<(), Error> {
        match self {
            Place::Cuda(_) if element == ElementType::F32 => Err(Error::Setting(format!(
                "--dtype f32 is not for --device {self}: f32 is the host device's precision, for comparisons; use \
                 --dtype bf16 or --device host"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether its kernels compute a model of these sizes: past their limits they would leave rows unwritten.
    ///
    /// # Errors
    /// They do not: the setting, its value and the limit.
    pub fn takes(self, config: &ModelConfig) -> Result<(), Error> {
        match self {
            Place::Host => Ok(()),
            Place::Cuda(_) => limits::check(config),
        }
    }

    /// Opens the device with its kernels loaded. Fresh memory is poisoned or zeroed; the host device has
    /// `host_memory` bytes of it.
    ///
    /// # Errors
    /// It does not run `element`; or it, or what it needs, is missing or too old.
    pub fn open(self, element: ElementType, poison: bool, host_memory: usize) -> Result<Device, Error> {
        self.runs(element)?;
        let device = match self {
            Place::Host => {
                Device::host(HostOptions { poison, memory_bytes: host_memory, ..HostOptions::default() })
            }
            Place::Cuda(ordinal) => Device::cuda_with(CudaOptions { ordinal, poison })?,
        };
        device.prepare(kernels::source::ALL)?;
        Ok(device)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("host"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}
