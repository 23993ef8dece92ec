//! The memory plan: what a model will take, part by part, before any weight is read.

use std::fmt;

use kernels::numerics::ElementType;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::lanes::LaneLayout;
use crate::scratch::{RoundLimits, Scratch};
use crate::weights::WeightPlan;

/// Every part of device memory with its size, and the setting that changes it.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    label: &'static str,
    bytes: usize,
    detail: String,
    setting: &'static str,
}

impl MemoryPlan {
    /// The plan for running a model with these sizes. `lanes` are, for each cache class: its layout, the slots
    /// that are made at start, and its pages.
    pub fn new(
        config: &ModelConfig,
        element: ElementType,
        weights: &WeightPlan,
        lanes: &[(&LaneLayout, usize, usize)],
        limits: RoundLimits,
    ) -> MemoryPlan {
        let table = weights.table_bytes();
        let part = |label, bytes, detail: String, setting| Part { label, bytes, detail, setting };
        let kind = element.name();
        let mut parts = vec![
            part(
                "weights",
                weights.bytes() - table,
                format!("{kind}, read once into device memory"),
                "--dtype",
            ),
            part("n-gram table", table, format!("{kind}, in device memory"), "--dtype"),
        ];
        for &(layout, slots, pages) in lanes {
            let (slot, page) = (layout.slot.bytes(), layout.page_bytes);
            parts.push(part("lane slots", slots * slot, format!("{slots} of {slot} bytes"), "--lanes"));
            let detail = format!("{pages} of {page} bytes, 64 positions each");
            parts.push(part("pages", pages * page, detail, "--memory"));
        }
        let buffers = Scratch::bytes(config, element, limits);
        parts.push(part("round buffers", buffers, format!("rounds of up to {} rows", limits.rows), ""));
        MemoryPlan { parts }
    }

    /// Whether the plan fits so many free bytes.
    ///
    /// # Errors
    /// It does not: both sizes, and the settings of the largest parts.
    pub fn check(&self, free: usize) -> Result<(), Error> {
        if self.bytes() <= free {
            return Ok(());
        }
        let mut parts: Vec<&Part> = self.parts.iter().collect();
        parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
        let part = |part: &&Part| format!("{} {}", part.label, Size(part.bytes));
        let parts: Vec<String> = parts.iter().take(3).map(part).collect();
        Err(Error::Setting(format!(
            "the memory plan takes {} and the device has {} free; the largest parts are {}: lower --memory, --lanes \
             or --context, or try fewer --layers of a --load dummy",
            Size(self.bytes()),
            Size(free),
            parts.join(", ")
        )))
    }

    /// Size of all parts in bytes.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "memory plan  {}", Size(self.bytes()))?;
        for part in self.parts.iter().filter(|part| part.bytes > 0) {
            let changed =
                if part.setting.is_empty() { String::new() } else { format!(" ({})", part.setting) };
            writeln!(
                f,
                "  {:<14} {:>10}  {}{changed}",
                part.label,
                Size(part.bytes).to_string(),
                part.detail
            )?;
        }
        Ok(())
    }
}

/// A size in bytes, printed with three digits and a binary unit.
pub struct Size(pub usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let (mut size, mut unit) = (self.0 as f64, 0);
        while size >= 1000.0 && unit + 1 < UNITS.len() {
            size /= 1024.0;
            unit += 1;
        }
        let decimals = if unit == 0 || size >= 100.0 {
            0
        } else if size >= 10.0 {
            1
        } else {
            2
        };
        write!(f, "{size:.decimals$} {}", UNITS[unit])
    }
}
