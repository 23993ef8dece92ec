//! How much memory the system has to give. A plan that needs more is refused with both numbers; a process that takes more is
//! killed without a word.

use std::process;

use sysinfo::{CGroupLimits, MemoryRefreshKind, Pid, ProcessRefreshKind, ProcessesToUpdate, System};

/// What this process can still take, as far as the system says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Free {
    /// Bytes of memory that other processes and this one leave. What the system keeps of files is among them.
    pub(crate) memory: usize,
    /// Bytes of swap. Pinned memory is never there.
    pub(crate) swap: usize,
    /// Whether it is a control group that has no more, and not the machine.
    pub(crate) grouped: bool,
}

impl Free {
    /// What there is now; nothing if the system does not say.
    pub(crate) fn now() -> Option<Free> {
        let mut system = System::new().ok()?;
        system.refresh_memory_specifics(MemoryRefreshKind::everything());
        let own = Pid::from_u32(process::id());
        let nothing = ProcessRefreshKind::nothing();
        system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own]), false, nothing);
        let group = system.process(own).and_then(|process| process.cgroup_limits());
        let group = group.or_else(|| system.cgroup_limits());
        let memory = system.available_memory();
        (memory > 0).then(|| Free::within(memory, system.free_swap(), group.as_ref()))
    }

    /// What a machine has free, within what a control group may take of it: such a group may be denied swap, so none of
    /// it counts.
    fn within(memory: u64, swap: u64, group: Option<&CGroupLimits>) -> Free {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        // Not what the group calls free: that leaves out what it keeps of files.
        let left = group.map_or(u64::MAX, |group| group.total_memory.saturating_sub(group.rss));
        match left < memory.saturating_add(swap) {
            true => Free { memory: bytes(left.min(memory)), swap: 0, grouped: left < memory },
            false => Free { memory: bytes(memory), swap: bytes(swap), grouped: false },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(memory: usize, swap: usize, grouped: bool) -> Free {
        Free { memory, swap, grouped }
    }

    #[test]
    fn a_group_has_no_more_than_its_limit_and_no_swap() {
        let group =
            |total_memory, rss| Some(CGroupLimits { total_memory, free_memory: 0, free_swap: 50, rss });
        let within = |group: Option<CGroupLimits>| Free::within(100, 20, group.as_ref());
        assert_eq!(within(None), free(100, 20, false));
        assert_eq!(within(group(1000, 30)), free(100, 20, false), "the machine has less");
        assert_eq!(within(group(90, 30)), free(60, 0, true));
        assert_eq!(within(group(90, 95)), free(0, 0, true));
        assert_eq!(within(group(140, 30)), free(100, 0, false), "the group has all memory and may not swap");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn it_is_within_what_the_kernel_says() {
        let said = std::fs::read_to_string("/proc/meminfo").expect("every Linux has it");
        let bytes = |name: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(name)).expect("a known line");
            let kib = line.trim_start_matches(':').trim_end_matches("kB").trim();
            kib.parse::<usize>().expect("a number") << 10
        };
        let Free { memory, swap, .. } = Free::now().expect("the kernel says");
        assert!((16 << 20..=bytes("MemTotal")).contains(&memory), "{memory}");
        assert!(swap <= bytes("SwapTotal"), "{swap}");
    }
}
