//! `plan`: scenes from files and from stdin.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use crate::binary::{Ended, bare, run};

fn typed(scene: &str) -> Ended {
    let mut line = bare();
    line.args(["plan", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = line.spawn().expect("the binary starts");
    child.stdin.take().unwrap().write_all(scene.as_bytes()).unwrap();
    Ended::new(child.wait_with_output().unwrap())
}

#[test]
fn the_scenes_of_the_repository_play_the_same_from_a_file_and_from_stdin() {
    let scenes = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenes");
    for (name, words) in [
        ("lanes.txt", &["freed lane 1", "rows 2  graph", "eager (prompt pass)", "finished r2: stop"][..]),
        ("pages.txt", &["refused r3: needs 5 pages", "finished r1: cancelled", "admitted r2"]),
        ("prompts.txt", &["prompt 0..64", "prompt 192..200 (last)"]),
    ] {
        let file = scenes.join(name);
        let played = run(bare().arg("plan").arg(&file)).good().stdout;
        for word in words {
            assert!(played.contains(word), "{word:?} is not in {name}:\n{played}");
        }
        assert!(played.contains("nothing to run"), "{name} is not played to its end");
        assert_eq!(typed(&fs::read_to_string(&file).unwrap()).good().stdout, played);
    }
    assert_eq!(fs::read_dir(scenes).unwrap().count(), 3, "a scene is not tested");
}

#[test]
fn a_scene_that_does_not_parse_is_refused_with_its_line_and_word() {
    for (scene, words) in [
        ("slab slots=1\ndance A", ["line 2", "`dance`"]),
        ("arrive A prompt=x max=1", ["line 1", "`prompt=x`"]),
        ("slab slots=1\n# A comes\n\narrive A max=1", ["line 4", "`A`"]),
        ("slab slots=1\nrun 3 rounds", ["line 2", "`rounds`"]),
        ("slab slots=0", ["line 1", "`slab`"]),
        ("slab slots=1\ncancel B", ["line 2", "`B`"]),
        ("limits rows=65\n", ["line 1", "`limits`"]),
        ("", ["line 1", "slabs"]),
    ] {
        typed(scene).refused(&words);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    run(bare().args(["plan", "absent.txt"])).refused(&["absent.txt"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("noise.txt");
    fs::write(&file, [0xff, 0xfe, 0x00]).unwrap();
    run(bare().arg("plan").arg(&file)).refused(&["noise.txt"]);
    fs::write(&file, "dance").unwrap();
    run(bare().arg("plan").arg(&file)).refused(&["noise.txt", "line 1"]);
}
