//! Pictures and videos on the command line: probes, the folder that files come from, limits.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ExtendedColorType, ImageEncoder};
use serde_json::{Value, json};

use crate::binary::{Ended, data, generate, on, run};
use crate::folder::Folder;

/// Answers a chat file whose pictures lie in `root`.
fn answer(chat: &Value, root: &Path, options: &[&str]) -> Ended {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.json");
    fs::write(&file, chat.to_string()).unwrap();
    let paths = ["--messages", file.to_str().unwrap(), "--image-root", root.to_str().unwrap()];
    generate(&[&paths, options].concat())
}

fn parts(parts: &[Value]) -> Value {
    json!([{"role": "user", "content": parts}])
}

fn picture(name: &str) -> Value {
    json!({"type": "image", "image": name})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A PNG of one gray: a small file of any size.
fn gray(width: u32, height: u32) -> Vec<u8> {
    let mut file = Vec::new();
    let pixels = vec![200u8; width as usize * height as usize];
    PngEncoder::new_with_quality(&mut file, CompressionType::Default, FilterType::NoFilter)
        .write_image(&pixels, width, height, ExtendedColorType::L8)
        .unwrap();
    file
}

fn probes() -> Vec<Value> {
    let all: Value = serde_json::from_str(&fs::read_to_string(data("probes/tiny.json")).unwrap()).unwrap();
    let seen = |probe: &Value| {
        let mut contents = probe["messages"].as_array().unwrap().iter().map(|message| &message["content"]);
        contents.any(|content| {
            content.as_array().is_some_and(|list| list.iter().any(|part| part["type"] != "text"))
        })
    };
    all["probes"].as_array().unwrap().iter().filter(|probe| seen(probe)).cloned().collect()
}

#[test]
fn picture_and_video_probes_are_answered() {
    let probes = probes();
    assert_eq!(probes.len(), 13);
    for probe in probes {
        let mut chat = json!({"messages": probe["messages"]});
        if let Some(thinking) = probe.get("enable_thinking") {
            chat["enable_thinking"] = thinking.clone();
        }
        let report = answer(&chat, &data("probes/images"), &["--json"]).good().json();
        assert_eq!(report["text"], probe["expected"], "{}", probe["id"]);
        assert_eq!(report["ids"], probe["bf16"]["ids"], "{}", probe["id"]);
        assert_eq!(report["usage"]["prompt_tokens"], probe["prompt_ids"].as_array().unwrap().len());
    }
}

#[test]
fn pictures_come_before_the_text_of_a_prompt() {
    let [small, tall, shapes] = ["small", "tall", "two_shapes"]
        .map(|name| data(&format!("probes/images/{name}.png")).display().to_string());
    let one = generate(&["--image", &shapes, "--prompt", "What color is the square?"]).good();
    assert_eq!(one.stdout, "The square is blue.\n");
    let two = ["--image", &small, "--image", &tall];
    let both = generate(&[&two[..], &["--prompt", "Describe both pictures."]].concat()).good();
    assert!(both.stdout.starts_with("First picture: There is an orange triangle"), "{}", both.stdout);
    // Every prompt of the line has them.
    let asks = [
        "--image",
        &shapes,
        "--prompt",
        "What color is the square?",
        "--prompt",
        "How many shapes are there?",
    ];
    let several = generate(&[&asks[..], &["--max-tokens", "20"]].concat()).good();
    assert_eq!(several.stdout, "The square is blue.\nThere are 2 shapes.\n");
}

#[test]
fn files_come_from_inside_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("a.png"), gray(32, 32)).unwrap();
    fs::write(dir.path().join("secret.png"), gray(32, 32)).unwrap();
    symlink("../secret.png", root.join("out.png")).unwrap();
    let outside = dir.path().join("secret.png");
    let at = "chat.json: messages[0].content[0]";
    for (name, words) in [
        ("../secret.png", "no name inside"),
        (outside.to_str().unwrap(), "no name inside"),
        ("/dev/zero", "no name inside"),
        ("out.png", "leads out of"),
        ("absent.png", "absent.png"),
        (".", "no file"),
    ] {
        answer(&parts(&[picture(name)]), &root, &[]).refused(&[at, words]);
        let frames = json!({"type": "video", "video": ["a.png", name], "fps": 2});
        answer(&parts(&[frames]), &root, &[]).refused(&["messages[0].content[0].video[1]", words]);
    }
    answer(&parts(&[picture("a.png")]), &dir.path().join("absent"), &[]).refused(&["absent", "--image-root"]);
    let chat = dir.path().join("chat.json");
    fs::write(&chat, parts(&[picture("a.png")]).to_string()).unwrap();
    generate(&["--messages", chat.to_str().unwrap()]).refused(&[at, "a.png", "--image-root"]);
}

#[test]
fn parts_that_are_no_pictures_are_refused_with_their_place() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("a.png"), gray(32, 32)).unwrap();
    let place = "messages[1].content[0]";
    for (part, words) in [
        (json!({"type": "image"}), "name a file"),
        (json!({"type": "image", "image": 5}), "name a file"),
        (json!({"type": "image", "image": "a.png", "detail": "low"}), "no field detail"),
        (json!({"image": "a.png"}), "a part of kind image"),
        (json!({"type": "image_url", "image_url": {"url": "a.png"}}), "a part of kind image_url"),
        (json!({"type": "audio", "audio": "a.wav"}), "a part of kind audio"),
        (json!({"type": "video", "video": ["a.png", "a.png"]}), "fps"),
        (json!({"type": "video", "video": ["a.png", "a.png"], "fps": 0}), "fps"),
        (json!({"type": "video", "video": "a.png", "fps": 1}), "a list of files"),
        (json!({"type": "video", "video": ["a.png"], "fps": 1}), "at least 2"),
        (json!({"type": "video", "video": [], "fps": 1}), "no frame"),
    ] {
        let chat =
            json!([{"role": "user", "content": "Hello!"}, {"role": "user", "content": [part, text("?")]}]);
        answer(&chat, root.path(), &[]).refused(&["chat.json", place, words]);
    }
    for role in ["system", "assistant", "tool"] {
        let chat = json!([{"role": "user", "content": "a"}, {"role": role, "content": [picture("a.png")]}]);
        answer(&chat, root.path(), &[]).refused(&[place, role, "user message"]);
    }
    for word in ["<|image_pad|>", "<|video_pad|>"] {
        answer(&parts(&[picture("a.png"), text(word)]), root.path(), &[]).refused(&[
            "messages[0].content[1]",
            word,
            "stands for a picture",
        ]);
        generate(&["--prompt", word]).refused(&[word, "stands for a picture"]);
        generate(&["--raw", "--prompt", word]).refused(&["position 0", "stands for a picture"]);
    }
    generate(&["--ids", "5,2026"]).refused(&["2026", "position 1", "stands for a picture"]);
}

#[test]
fn limits_are_named_before_the_model_is_loaded() {
    let root = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(root.path().join(name), bytes).unwrap();
    write("giant.png", &gray(12_000, 12_000));
    write("dot.png", &gray(1, 1));
    write("long.png", &gray(1005, 5));
    write("cut.png", &gray(64, 64)[..40]);
    write("text.png", b"hello");
    let start = Instant::now();
    for (name, words) in [
        ("giant.png", "12000 x 12000"),
        ("long.png", "at most 200 times"),
        ("cut.png", "damaged or cut"),
        ("text.png", "no picture of a known format"),
    ] {
        answer(&parts(&[picture("dot.png"), picture(name)]), root.path(), &[])
            .refused(&["messages[0].content[1]", words]);
        let path = root.path().join(name);
        let named = format!("--image {}", path.display());
        generate(&["--image", path.to_str().unwrap(), "--prompt", "a"]).refused(&[&named, words]);
    }
    answer(&parts(&vec![picture("dot.png"); 1025]), root.path(), &[])
        .refused(&["messages[0].content[1024]", "at most 1024"]);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    answer(&parts(&vec![picture("dot.png"); 1000]), root.path(), &["--context", "2048"])
        .refused(&["of 1000 pictures", "context of 2048"]);
    generate(&["--image", "absent.png", "--prompt", "a"]).refused(&["absent.png", "--image"]);
    generate(&["--image", "/dev/zero", "--prompt", "a"]).refused(&["/dev/zero", "no file"]);
}

#[test]
fn a_model_without_a_tower_says_that_it_is_blind() {
    let folder = Folder::new().without("preprocessor_config.json");
    let image = data("probes/images/small.png").display().to_string();
    let mut line = on("generate", folder.path());
    line.args(["--image", &image, "--prompt", "a"]);
    run(&mut line).refused(&["reads no pictures", "--image"]);
}
