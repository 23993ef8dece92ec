//! What loading says where no one can see a bar.

use crate::binary::generate;

#[test]
fn a_pipe_gets_the_plan_a_line_before_and_a_line_after() {
    let notes = generate(&["--ids", "1", "--max-tokens", "1"]).good().stderr;
    let lines: Vec<&str> = notes.lines().collect();
    let at = |start: &str| {
        let found: Vec<usize> = (0..lines.len()).filter(|at| lines[*at].starts_with(start)).collect();
        assert_eq!(found.len(), 1, "{start:?} in:\n{notes}");
        found[0]
    };
    let order = [
        "loading ",
        "device host",
        "memory plan  400 MiB of the device",
        "reading 28.0 MiB",
        "read 28.0 MiB",
        "length after 1",
    ];
    assert!(order.map(at).is_sorted(), "{notes}");
    assert!(lines.len() < 20, "{notes}");
    assert!(!notes.contains('\r') && !notes.contains('\x1b'), "{notes:?}");
}
