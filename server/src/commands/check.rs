//! `roundhouse check`: one receipt per equality, each when it is decided; with --dense fp8 also what that changes.

use indicatif::{ProgressBar, ProgressStyle};
use runtime::open::Load;
use runtime::probe::LogitsOptions;
use runtime::quality;
use runtime::receipts::{self, CheckOptions, Receipt, Step};
use runtime::weights::DenseForm;

use super::engine_failure;
use crate::args::{CheckArgs, Chosen};
use crate::failure::Failure;
use crate::output::{Output, note};
use crate::ranks::{self, Begun};

/// Of the equality that is being played, on a terminal.
const TEMPLATE: &str = "{msg:<18} {pos} of {len} schedules, {elapsed_precise}";

/// Checks the equalities.
pub(crate) fn check(args: &CheckArgs) -> Result<(), Failure> {
    let chosen = args.run.choose()?;
    let checked = CheckOptions { exchange: args.ranks.exchange(), ..chosen.receipts(args.cases, args.seed) };
    let options = receipts::engine_options(&checked);
    let Begun::Leads(rank) = ranks::begin(&args.ranks, &args.model, &options)? else { return Ok(()) };
    note(chosen.opening(&args.model));
    let (mut out, mut told) = (Output::stdout(), super::told());
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well formed");
    let bar = ProgressBar::new(args.cases.into()).with_style(style);
    let receipts = receipts::check(&args.model, &checked, rank.map(|rank| *rank), &mut |step| match step {
        Step::Opening(progress) => told(progress),
        Step::Whole => {
            note("loading the whole model beside this rank's half, to compare two ranks with one");
            told = super::told();
        }
        Step::Played { name, done, least } => {
            if done == 0 {
                bar.reset();
            }
            bar.set_message(name);
            bar.set_length(done.max(least).into());
            bar.set_position(done.into());
        }
        Step::Decided(receipt) => bar.suspend(|| out.print(&format!("{receipt}\n"))),
    });
    bar.finish_and_clear();
    let receipts = receipts.map_err(engine_failure)?;
    if let Load::Checkpoint { dense: dense @ DenseForm::Fp8 } = chosen.load {
        let Chosen { place, element, load, table, .. } = chosen;
        let options = LogitsOptions { place, element, load, table, ..LogitsOptions::default() };
        let quality = quality::of_dense(&args.model, &options, dense).map_err(engine_failure)?;
        out.print(&format!("dense fp8          against the model as it is stored: {quality}\n"));
    }
    out.finish()?;
    passed(&receipts)
}

/// A failure that names the receipts that failed, if any did.
pub(super) fn passed(receipts: &[Receipt]) -> Result<(), Failure> {
    let failed: Vec<&str> =
        receipts.iter().filter(|receipt| !receipt.passed).map(|receipt| receipt.name).collect();
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::Check(format!("{} does not hold; the receipt says where", failed.join(", ")))),
    }
}
