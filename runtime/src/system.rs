//! How much memory the system has to give. A plan that needs more is refused with both numbers; a process that takes more is
//! killed without a word.

use std::process;

use sysinfo::{MemoryRefreshKind, Pid, ProcessRefreshKind, ProcessesToUpdate, System};

/// Bytes that this process can still take: available memory and free swap, and no more than its control group has left.
/// What the system keeps of files counts as available. None if the system does not say.
pub(crate) fn available_bytes() -> Option<usize> {
    let mut system = System::new().ok()?;
    system.refresh_memory_specifics(MemoryRefreshKind::everything());
    let free = (system.available_memory() > 0).then(|| system.available_memory() + system.free_swap())?;
    let own = Pid::from_u32(process::id());
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own]), false, ProcessRefreshKind::nothing());
    let group =
        system.process(own).and_then(|process| process.cgroup_limits()).or_else(|| system.cgroup_limits());
    // Not what the group calls free: that leaves out what it keeps of files.
    let left = group.map(|group| group.total_memory.saturating_sub(group.rss) + group.free_swap);
    Some(usize::try_from(left.map_or(free, |left| free.min(left))).unwrap_or(usize::MAX))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::available_bytes;

    #[test]
    fn it_is_what_the_kernel_says() {
        let said = std::fs::read_to_string("/proc/meminfo").expect("every Linux has it");
        let kib = |name: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(name)).expect("a known line");
            line.trim_start_matches(':').trim_end_matches("kB").trim().parse::<usize>().expect("a number")
        };
        let most = (kib("MemTotal") + kib("SwapTotal")) << 10;
        let have = available_bytes().expect("the kernel says");
        assert!((16 << 20..=most).contains(&have), "{have} of {most}");
    }
}
