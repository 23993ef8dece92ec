//! `roundhouse convert`: a model folder written anew in other formats.

use runtime::open::Progress;

use super::engine_failure;
use crate::args::ConvertArgs;
use crate::failure::Failure;
use crate::loading::Loading;
use crate::output::{Output, note};

/// Converts a folder; says for each purpose what became of its tensors.
pub(crate) fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    let options = args.options()?;
    let mut loading = Loading::of_conversion();
    let mut told = |done, total| {
        if let Some(line) = loading.line(&Progress::Loading { done, total }) {
            note(line);
        }
    };
    let summary =
        runtime::convert::convert(&args.model, &args.out, &options, &mut told).map_err(engine_failure)?;
    let mut out = Output::stdout();
    summary.outcomes.iter().for_each(|outcome| out.print(&format!("{outcome}\n")));
    note(format_args!("wrote {} weight files to {}", summary.files, args.out.display()));
    out.finish()
}
