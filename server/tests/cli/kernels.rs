//! `kernels build`: the cache filled ahead of time, with NVRTC or without.

use crate::binary::{bare, run};

#[test]
fn kernels_are_built_once_or_what_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let build =
        || run(bare().args(["kernels", "build", "--arch", "sm_90a"]).env("ROUNDHOUSE_CACHE", folder.path()));
    let first = build();
    if first.status == Some(3) {
        assert!(first.stdout.is_empty(), "{first:?}");
        for word in ["NVRTC", "libnvrtc.so", "LD_LIBRARY_PATH", "cuda-nvrtc"] {
            assert!(first.stderr.contains(word), "{word:?} is not in: {first:?}");
        }
        return;
    }
    let (first, second) = (first.good().stdout, build().good().stdout);
    assert!(first.lines().count() > 20 && first.lines().all(|line| line.ends_with(" compiled")), "{first}");
    assert_eq!(second, first.replace(" compiled\n", " cached\n"));
    for word in ["sm_90a", " attend ", " registers", "no spills"] {
        assert!(first.contains(word), "{word:?} is not in: {first}");
    }
}

#[test]
fn a_name_that_is_no_architecture_is_usage() {
    run(bare().args(["kernels", "build", "--arch", "hopper"])).refused(&["--arch", "hopper", "sm_90a"]);
}
