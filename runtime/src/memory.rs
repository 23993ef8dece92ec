//! The memory plan: what a model will take, part by part, before any weight is read.

use std::fmt;

use graph::Device;
use kernels::numerics::ElementType;

use crate::config::VisionConfig;
use crate::error::Error;
use crate::lanes::LaneLayout;
use crate::open::{Load, Opened};
use crate::runner::pinned_bytes;
use crate::scratch::{RoundLimits, Scratch};
use crate::share::Share;
use crate::system::Free;
use crate::tower::{TowerBuffers, TowerLimits};
use crate::weights::{TablePlace, WeightForm};

/// Every part of memory with its size, and the setting that changes it.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// Whose.
    share: Share,
    /// Whether the weights are in no file.
    made: bool,
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    label: &'static str,
    bytes: usize,
    place: Place,
    time: Time,
    detail: String,
    /// What makes it smaller; empty for what follows from the model.
    setting: &'static str,
}

/// When a part is there. What is needed while the model is loaded is given back before the rest is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    /// From the first weight on.
    Always,
    /// While the weights are read.
    Loading,
    /// Once they are.
    Running,
    /// As it fills, up to its size: the oldest of it goes when it is full.
    Filling,
}

/// Where a part lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Memory of the device.
    Device,
    /// Memory of the host, pinned or not.
    Host,
    /// A file, of which the system keeps in memory what it likes.
    File,
}

/// The lanes of a cache class.
#[derive(Clone, Copy, Debug)]
pub struct ClassPlan<'a> {
    /// The layout of a lane.
    pub layout: &'a LaneLayout,
    /// Lanes that are made at start.
    pub first: usize,
    /// Most lanes.
    pub lanes: usize,
    /// Pages.
    pub pages: usize,
}

/// The most that graphs may take.
#[derive(Clone, Copy, Debug)]
pub struct GraphPlan {
    /// Bytes.
    pub bytes: usize,
    /// Whether the device's memory holds them; the host's otherwise.
    pub on_device: bool,
}

impl GraphPlan {
    /// No graphs.
    pub const NONE: GraphPlan = GraphPlan { bytes: 0, on_device: false };
}

impl MemoryPlan {
    /// The plan for running a model with these sizes, all that may come later included.
    pub fn new(
        opened: &Opened,
        classes: &[ClassPlan<'_>],
        limits: RoundLimits,
        graphs: GraphPlan,
    ) -> MemoryPlan {
        let Opened { weights, load, .. } = opened;
        let WeightForm { element, table, share, .. } = weights.form();
        let (kind, table_kind) = weights.stored().text(element);
        let (place, home) = match table {
            TablePlace::Device => (Place::Device, "in device memory"),
            TablePlace::Pinned => (Place::Host, "in pinned host memory"),
            TablePlace::Mapped => (Place::File, "mapped from the checkpoint's files"),
        };
        let (come, setting) = match load {
            Load::Checkpoint { .. } => ("read once into device memory", "--dtype"),
            Load::Dummy { .. } => ("made in device memory", "--layers"),
        };
        let part = |label, bytes, place, detail, setting| {
            let time = Time::Running;
            Part { label, bytes, place, time, detail, setting }
        };
        let always = |part| Part { time: Time::Always, ..part };
        let (staging, way) = (opened.staging_bytes(), "a batch at a time, only while weights are read");
        let (ring, turns) = match load {
            Load::Checkpoint { .. } => {
                (weights.ring_bytes(), "pinned, two in turn, only while weights are read")
            }
            Load::Dummy { .. } => (0, ""),
        };
        let mut parts = vec![
            always(part("weights", weights.bytes(), Place::Device, format!("{kind}, {come}"), setting)),
            always(part(
                "n-gram table",
                weights.table_bytes(),
                place,
                format!("{table_kind}, {home}"),
                "--table",
            )),
            Part { time: Time::Loading, ..part("load buffer", staging, Place::Device, way.into(), "") },
            Part { time: Time::Loading, ..part("read buffers", ring, Place::Host, turns.into(), "") },
        ];
        for &ClassPlan { layout, first, lanes, pages } in classes {
            let (slot, page) = (layout.slot.bytes(), layout.page_bytes);
            let later = match lanes.saturating_sub(first) {
                0 => String::new(),
                later => format!(", {later} of them made when they are needed"),
            };
            let detail = format!("{lanes} of {slot} bytes{later}");
            parts.push(part("lane slots", lanes * slot, Place::Device, detail, "--lanes"));
            let detail = format!("{pages} of {page} bytes, 64 positions each");
            parts.push(part("pages", pages * page, Place::Device, detail, "--memory"));
        }
        let buffers = Scratch::bytes(weights.config(), share, element, limits);
        let rounds = format!("rounds of up to {} rows", limits.rows);
        parts.push(part("round buffers", buffers, Place::Device, rounds, ""));
        // A device must have room for them; those of the host are lists of calls, and few of them fill up their room.
        let (place, time) = match graphs.on_device {
            true => (Place::Device, Time::Running),
            false => (Place::Host, Time::Filling),
        };
        let detail = "recorded rounds, at most".into();
        parts.push(Part { time, ..part("graphs", graphs.bytes, place, detail, "--graphs") });
        let rings = pinned_bytes(limits);
        parts.push(part("staging rings", rings, Place::Host, "pinned, two buffers each".into(), ""));
        MemoryPlan { share, made: matches!(load, Load::Dummy { .. }), parts }
    }

    /// The plan with the buffers of the model's vision tower for encodings of up to `limits` too.
    pub fn with_tower(
        mut self,
        config: &VisionConfig,
        element: ElementType,
        limits: TowerLimits,
    ) -> MemoryPlan {
        let part = |label, bytes, place, detail| Part {
            label,
            bytes,
            place,
            time: Time::Running,
            detail,
            setting: "--vision",
        };
        let most = format!("pictures of up to {} patches", limits.patches);
        let pinned = format!("pinned, two of {} patches in turn", limits.piece);
        let bytes = TowerBuffers::bytes(config, element, limits);
        self.parts.push(part("vision buffers", bytes, Place::Device, most));
        self.parts.push(part("patches", TowerBuffers::pinned_bytes(config, limits), Place::Host, pinned));
        self
    }

    /// The plan with the features of pictures too: those that requests need, and those that are kept.
    pub fn with_features(mut self, bytes: usize) -> MemoryPlan {
        self.parts.push(Part {
            label: "picture features",
            bytes,
            place: Place::Device,
            time: Time::Running,
            detail: "of pictures under way and seen before, at most".into(),
            setting: "--vision",
        });
        self
    }

    /// The most device memory that is taken at a time, in bytes.
    pub fn bytes(&self) -> usize {
        self.most(&[Place::Device]).1
    }

    /// The time at which the most is needed of some places together, and how much.
    fn most(&self, places: &[Place]) -> (Time, usize) {
        let sum = |time| self.parts_at(places, &[Time::Always, time]).map(|part| part.bytes).sum::<usize>();
        let (loading, running) = (sum(Time::Loading), sum(Time::Running));
        if loading > running { (Time::Loading, loading) } else { (Time::Running, running) }
    }

    /// What there is of some places at some times.
    fn parts_at(&self, places: &[Place], times: &[Time]) -> impl Iterator<Item = &Part> {
        let there = move |part: &&Part| places.contains(&part.place) && times.contains(&part.time);
        self.parts.iter().filter(move |part| there(part) && part.bytes > 0)
    }

    /// Whether the plan fits the device, and the memory that the system has left: beside a device with memory of its own
    /// the host's part, which is pinned; all of it where the device is the host.
    ///
    /// # Errors
    /// It does not: the part that is too much, the bytes that are short, and what would help.
    pub fn check(&self, device: &Device) -> Result<(), Error> {
        self.fits(Room::Device, device.free_bytes())?;
        match (Free::now(), device) {
            (None, _) => Ok(()),
            (Some(Free { memory, swap, grouped }), Device::Host(_)) => {
                self.fits(Room::Machine { grouped }, memory.saturating_add(swap))
            }
            (Some(Free { memory, grouped, .. }), Device::Cuda(_)) => {
                self.fits(Room::Host { grouped }, memory)
            }
        }
    }

    /// Whether what shares a room fits in `free` bytes.
    fn fits(&self, room: Room, free: usize) -> Result<(), Error> {
        let (time, needed) = self.most(room.places());
        if needed <= free {
            return Ok(());
        }
        let mut sum = 0;
        let past = self.parts_at(room.places(), &[Time::Always, time]).find(|part| {
            sum += part.bytes;
            sum > free
        });
        let past = past.expect("the sum of all parts is past what is free");
        let helps = self.helps(room, time, needed - free);
        Err(Error::Setting(format!(
            "the model does not fit {room}: the plan needs {needed} bytes ({}) of its memory and {free} ({}) are \
             free, {} short; {} of {} bytes and what follows do not fit; {helps}",
            Size(needed),
            Size(free),
            needed - free,
            past.label,
            past.bytes,
        )))
    }

    /// What makes the plan smaller at a time, the most first.
    fn helps(&self, room: Room, time: Time, short: usize) -> String {
        let mut parts: Vec<(&str, usize)> = Vec::new();
        for part in
            self.parts_at(room.places(), &[Time::Always, time]).filter(|part| !part.setting.is_empty())
        {
            match parts.iter_mut().find(|(setting, _)| *setting == part.setting) {
                Some((_, bytes)) => *bytes += part.bytes,
                None => parts.push((part.setting, part.bytes)),
            }
        }
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let help = |(setting, bytes): (&str, usize)| {
            let how = match setting {
                // Weights have one size on a device that runs one type.
                "--dtype" => return None,
                "--layers" => "fewer --layers",
                "--table" if room == Room::Device => "--table pinned",
                "--table" if self.made => return None,
                "--table" => "--table mmap",
                "--graphs" => "--graphs off",
                "--lanes" => "fewer --lanes or a shorter --context",
                "--memory" => "a smaller --memory or a shorter --context",
                "--vision" => "--vision off, or fewer patches",
                other => other,
            };
            let enough = if bytes >= short { "" } else { ", not enough alone" };
            Some(format!("{how} (up to {}{enough})", Size(bytes)))
        };
        let helps: Vec<String> = parts.into_iter().filter_map(help).collect();
        match helps.is_empty() {
            true => format!("{} with more memory is needed", room.any()),
            false => format!("what helps: {}", helps.join("; ")),
        }
    }
}

/// Memory that parts of a plan share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// The device's own.
    Device,
    /// The host's, or what a control group leaves of it, beside a device with its own.
    Host { grouped: bool },
    /// The same where the host is the device.
    Machine { grouped: bool },
}

impl Room {
    fn places(self) -> &'static [Place] {
        match self {
            Room::Device => &[Place::Device],
            Room::Host { .. } => &[Place::Host],
            Room::Machine { .. } => &[Place::Device, Place::Host],
        }
    }

    /// Another one of its kind.
    fn any(self) -> &'static str {
        match self {
            Room::Device => "a device",
            Room::Host { grouped: false } | Room::Machine { grouped: false } => "a machine",
            Room::Host { grouped: true } | Room::Machine { grouped: true } => "a control group",
        }
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Room::Device => "the device",
            Room::Host { grouped: false } | Room::Machine { grouped: false } => "this machine",
            Room::Host { grouped: true } | Room::Machine { grouped: true } => {
                "the control group of this process"
            }
        })
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = match self.share {
            Share::WHOLE => String::new(),
            share => format!(" of rank {} of {}", share.rank(), share.ranks()),
        };
        write!(f, "memory plan{whose}  {} of the device", Size(self.bytes()))?;
        for (place, what) in [(Place::Host, "the host"), (Place::File, "files")] {
            let filling = self.parts_at(&[place], &[Time::Filling]).map(|part| part.bytes).sum::<usize>();
            match self.most(&[place]).1 + filling {
                0 => {}
                bytes => write!(f, ", {} of {what}", Size(bytes))?,
            }
        }
        writeln!(f)?;
        let parts = || self.parts.iter().filter(|part| part.bytes > 0);
        let width = parts().map(|part| part.label.len()).max().unwrap_or(0);
        for part in parts() {
            let changed =
                if part.setting.is_empty() { String::new() } else { format!(" ({})", part.setting) };
            writeln!(
                f,
                "  {:<width$} {:>10}  {}{changed}",
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

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(pages: usize) -> MemoryPlan {
        let part = |label, bytes, place, time, setting| {
            let detail = String::new();
            Part { label, bytes, place, time, detail, setting }
        };
        MemoryPlan {
            share: Share::WHOLE,
            made: false,
            parts: vec![
                part("weights", 100, Place::Device, Time::Always, "--dtype"),
                part("load buffer", 50, Place::Device, Time::Loading, ""),
                part("pages", pages, Place::Device, Time::Running, "--memory"),
                part("staging rings", 1000, Place::Host, Time::Running, ""),
            ],
        }
    }

    #[test]
    fn a_tower_is_a_line_of_the_plan() {
        let tiny = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let config = crate::config::ModelConfig::open(&tiny).expect("the repository's own model").vision;
        let (config, limits) = (config.expect("a tower"), TowerLimits::of(1000));
        let with = plan(200).with_tower(&config, ElementType::Bf16, limits);
        let buffers = TowerBuffers::bytes(&config, ElementType::Bf16, limits);
        assert_eq!(with.bytes(), plan(200).bytes() + buffers);
        assert!(with.to_string().contains("pictures of up to 1000 patches (--vision)"), "{with}");
        let says = with.fits(Room::Device, with.bytes() - 1).expect_err("one byte is short").to_string();
        assert!(says.contains("--vision off"), "{says}");
    }

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let text = plan(200).with_features(5000).to_string();
        let ends = text.lines().skip(1).map(|line| line.find('B').expect("a size"));
        let ends: Vec<usize> = ends.collect();
        assert!(ends.len() == 5 && ends.iter().all(|end| *end == ends[0]), "{text}");
    }

    #[test]
    fn what_loading_needs_is_given_back_before_the_rest_is_taken() {
        for (pages, most, past, helps) in [
            (20, 150, "load buffer of 50 bytes", "a device with more memory"),
            (80, 180, "pages of 80 bytes", "a smaller --memory"),
        ] {
            let plan = plan(pages);
            assert_eq!(plan.bytes(), most);
            plan.fits(Room::Device, most).expect("it just fits");
            let says = plan.fits(Room::Device, most - 1).expect_err("one byte is short").to_string();
            for words in [&format!("needs {most} bytes"), "1 short", past, helps] {
                assert!(says.contains(words), "{words:?} is not in: {says}");
            }
        }
    }

    /// A table in pinned memory is the host's, beside a device or as the device.
    #[test]
    fn the_host_has_an_end_too() {
        let mut plan = plan(20);
        plan.parts[3] =
            Part { label: "n-gram table", time: Time::Always, setting: "--table", ..plan.parts[3].clone() };
        // What may fill up is no need.
        plan.parts.push(Part {
            label: "graphs",
            time: Time::Filling,
            setting: "--graphs",
            ..plan.parts[3].clone()
        });
        for (room, most, whose) in [
            (Room::Host { grouped: false }, 1000, "this machine"),
            (Room::Machine { grouped: false }, 1150, "this machine"),
            (Room::Machine { grouped: true }, 1150, "the control group of this process"),
        ] {
            plan.fits(room, most).expect("it just fits");
            let says = plan.fits(room, most - 1).expect_err("one byte is short").to_string();
            let needs = format!("does not fit {whose}: the plan needs {most} bytes");
            for words in [&needs, "n-gram table of 1000 bytes", "what helps: --table mmap"] {
                assert!(says.contains(words), "{words:?} is not in: {says}");
            }
        }
        assert!(plan.to_string().contains(", 1.95 KiB of the host"), "{plan}");
        let made = MemoryPlan { made: true, ..plan.clone() };
        for (grouped, helps) in [(false, "a machine"), (true, "a control group")] {
            let says = made.fits(Room::Host { grouped }, 1).expect_err("it is short").to_string();
            assert!(says.ends_with(&format!("{helps} with more memory is needed")), "{says}");
        }
        let host = Device::host(graph::host::HostOptions::default());
        plan.check(&host).expect("it is small");
        plan.parts[3].bytes = 1 << 50;
        let says = plan.check(&host).expect_err("no machine has a pebibyte").to_string();
        assert!(
            says.contains("does not fit the control group") || says.contains("does not fit this machine"),
            "{says}"
        );
    }
}
