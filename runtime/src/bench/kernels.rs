//! Kernels on their own: all launches of one kind in a round, repeated in a graph, against the bytes they move.

use std::fmt;

use graph::{Emission, Entry};
use half::bf16;
use kernels::numerics::ElementType;
use serde_json::{Value, json};

use super::moves::{Seen, moved};

/// The kernels of one round.
#[derive(Clone, Debug)]
pub struct KernelTable {
    /// `decode` or `prompt`.
    pub kind: &'static str,
    /// Rows of the round.
    pub rows: usize,
    /// Positions that its first row sees; synthetic.
    pub context: usize,
    /// Distinct experts of the launches measured.
    pub distinct: usize,
    /// By kind of kernel, in the order of their first launch.
    pub kernels: Vec<KernelRow>,
    /// The whole round, replayed back to back.
    pub device_ms: f64,
}

/// One kind of kernel.
#[derive(Clone, Debug)]
pub struct KernelRow {
    /// Its name.
    pub name: &'static str,
    /// Launches in the round.
    pub launches: usize,
    /// Seconds of a launch, one after another in a graph.
    pub seconds: f64,
    /// Seconds that a launch adds to the round: what the round takes less without this kind, per launch. On the
    /// host device, where launches do not overlap, its own seconds.
    pub in_place: f64,
    /// Bytes that a launch must move on average; 0 where they are too few to count.
    pub bytes: f64,
}

/// The kinds of kernels of an emission, in the order of their first launch.
pub(super) fn kinds(emission: &Emission) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = Vec::new();
    for entry in emission.entries() {
        if let Entry::Launch { kernel, .. } = entry
            && !names.contains(&kernel.name)
        {
            names.push(kernel.name);
        }
    }
    names
}

/// The launches of one kind, in order.
pub(super) fn of_kind(emission: &Emission, name: &str) -> Emission {
    emission.pick(|_, entry| is_kind(entry, name))
}

/// Whether an entry launches a kernel of this name.
pub(super) fn is_kind(entry: &Entry, name: &str) -> bool {
    matches!(entry, Entry::Launch { kernel, .. } if kernel.name == name)
}

/// What all launches of a list must move.
pub(super) fn bytes_of(list: &Emission, element: ElementType, seen: &Seen<'_>) -> f64 {
    let one = |at| match element {
        ElementType::F32 => moved::<f32>(list, at, seen),
        ElementType::Bf16 => moved::<bf16>(list, at, seen),
    };
    (0..list.len()).map(one).sum()
}

impl KernelRow {
    fn all(&self) -> f64 {
        self.launches as f64 * self.seconds
    }
}

impl KernelTable {
    fn sum_ms(&self) -> f64 {
        1e3 * self.kernels.iter().map(KernelRow::all).sum::<f64>()
    }

    pub(super) fn to_json(&self) -> Vec<Value> {
        let KernelTable { kind, rows, context, distinct, kernels, device_ms } = self;
        let row = |row: &KernelRow| {
            json!({
                "line": "kernel", "kind": kind, "rows": rows, "context": context, "distinct_experts": distinct,
                "kernel": row.name, "launches": row.launches, "us": 1e6 * row.seconds,
                "us_in_place": 1e6 * row.in_place, "bytes": row.bytes,
                "bytes_per_second": row.bytes / row.seconds, "ms_in_round": 1e3 * row.all(),
            })
        };
        let sum = json!({
            "line": "kernels", "kind": kind, "rows": rows, "context": context, "sum_ms": self.sum_ms(),
            "device_ms": device_ms,
        });
        kernels.iter().map(row).chain([sum]).collect()
    }
}

impl fmt::Display for KernelTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelTable { kind, rows, context, distinct, kernels, device_ms } = self;
        writeln!(
            f,
            "kernels of a {kind} round, {rows} rows, synthetic context {context}, {distinct} experts"
        )?;
        writeln!(
            f,
            "  kernel                    launches   us each  ms in all   share   in place         MB     TB/s"
        )?;
        let sum = self.sum_ms();
        for row in kernels {
            let (us, ms) = (1e6 * row.seconds, 1e3 * row.all());
            write!(f, "  {:<25} {:8} {us:9.2} {ms:10.4} {:6.1}% ", row.name, row.launches, 100.0 * ms / sum)?;
            write!(f, "{:10.2} ", 1e6 * row.in_place)?;
            match row.bytes > 0.0 {
                true => {
                    writeln!(f, "{:10.3} {:8.3}", row.bytes / 1e6, row.bytes / row.seconds / 1e12)?;
                }
                false => writeln!(f, "{:>10} {:>8}", "-", "-")?,
            }
        }
        let launches: usize = kernels.iter().map(|row| row.launches).sum();
        write!(f, "  {:<25} {launches:8} {:>9} {sum:10.4}; the round itself {device_ms:.4} ms", "sum", "")
    }
}
