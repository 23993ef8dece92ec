//! What every kernel takes of a multiprocessor, in text.

use std::fmt;

use crate::{ARCHITECTURES, Unit, twin};

/// One line per kernel and architecture, of those that were compiled.
pub(crate) struct Table(pub(crate) &'static [Unit]);

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "registers, shared bytes (static + dynamic), local bytes, spilled bytes (stores / loads)"
        )?;
        write!(f, "{:<18}", "kernel")?;
        ARCHITECTURES.iter().try_for_each(|architecture| write!(f, " | {:<26}", architecture.name))?;
        writeln!(f)?;
        let first = self.0.iter().take_while(|unit| unit.architecture.name == ARCHITECTURES[0].name);
        for definition in first.flat_map(|unit| &unit.definitions) {
            let twin = twin(definition);
            write!(f, "{:<18}", twin.symbol)?;
            for architecture in &ARCHITECTURES {
                let unit = self.0.iter().find(|unit| {
                    unit.architecture.name == architecture.name && unit.source.name == twin.source.name
                });
                let compiled =
                    unit.and_then(|unit| unit.compiled.get()).and_then(|kernels| kernels.as_ref().ok());
                let kernel = compiled.and_then(|kernels| kernels.iter().find(|k| k.symbol == twin.symbol));
                let cell = kernel.map_or("-".into(), |k| {
                    let shared = format!("{}+{}", k.shared_bytes, twin.shared_bytes);
                    format!(
                        "{:3} {shared:>11} {:3} {}/{}",
                        k.registers, k.local_bytes, k.spill_stores, k.spill_loads
                    )
                });
                write!(f, " | {cell:<26}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
