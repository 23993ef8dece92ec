//! `roundhouse kernels`: device code ahead of time.

use graph::Device;
use graph::cuda::code::{self, Code, Origin, Resources};
use kernels::source::ALL;

use crate::args::BuildArgs;
use crate::failure::Failure;
use crate::output::{Output, note};

/// `kernels build`: fills the cache for each architecture, and prints what each kernel takes.
pub(crate) fn build(args: &BuildArgs) -> Result<(), Failure> {
    let supported = code::architectures().map_err(|error| {
        Failure::Device(format!(
            "{error}. NVRTC comes with the CUDA toolkit, 12.8 or newer: as the package cuda-nvrtc of NVIDIA's \
             repositories, or as the Python wheel nvidia-cuda-nvrtc"
        ))
    })?;
    let named = args.arch.iter().map(|arch| arch.0.clone()).collect::<Vec<_>>();
    let architectures = if named.is_empty() { vec![own()?] } else { named };
    for name in &architectures {
        if !supported.contains(&code::number(name).unwrap_or_default()) {
            let known = supported.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", ");
            return Err(Failure::Input(format!(
                "--arch {name} is none that this NVRTC compiles for: {known}"
            )));
        }
    }
    let mut out = Output::stdout();
    for architecture in architectures {
        let sources = code::by_source(ALL);
        for ((source, _), code) in sources.iter().zip(code::cached_each(&sources, &architecture)) {
            let code = code.map_err(|error| Failure::Device(error.to_string()))?;
            if let Origin::Unkept(why) = &code.from {
                note(format_args!("{} is compiled and not kept: {why}", source.name));
            }
            let from = origin(&code);
            for kernel in code.resources() {
                out.print(&line(&architecture, &kernel, from));
            }
        }
    }
    out.finish()
}

/// What the first CUDA device of this machine runs.
fn own() -> Result<String, Failure> {
    let open = Device::cuda(0);
    match open {
        Ok(Device::Cuda(device)) => Ok(device.architecture().to_owned()),
        Ok(Device::Host(_)) => unreachable!("a CUDA device was opened"),
        Err(error) => Err(Failure::Input(format!(
            "no CUDA device says what to compile for: {error}; name it, as in --arch sm_90a"
        ))),
    }
}

fn origin(code: &Code) -> &'static str {
    match code.from {
        Origin::Cache(_) => "cached",
        Origin::Compiler(_) => "compiled",
        Origin::Unkept(_) => "compiled, not kept",
    }
}

fn line(architecture: &str, kernel: &Resources, from: &str) -> String {
    let Resources { symbol, registers, spill_stores, spill_loads, .. } = kernel;
    let spills = match spill_stores + spill_loads {
        0 => "no spills".to_owned(),
        _ => format!("spills {spill_stores} bytes out, {spill_loads} in"),
    };
    format!("{architecture:<8} {symbol:<18} {registers:>3} registers  {spills:<12} {from}\n")
}
