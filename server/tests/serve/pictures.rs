//! Pictures and clips in chats: answers to them, limits before decoding, and nothing that a text can put in their place.

use std::fs;
use std::io::Cursor;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ExtendedColorType, ImageEncoder, ImageFormat, RgbImage};
use serde_json::{Value, json};

use crate::client::{Ask, is_of};
use crate::prompts::{CHAT, COMPLETIONS, chat, completion, endless, with};
use crate::server::Server;

crate::tests! {
    probes_are_answered_streamed_and_whole,
    a_follow_up_and_a_text_beside_pictures_are_answered,
    a_request_of_the_openai_client_is_taken,
    every_format_is_the_same_picture,
    all_orientations_are_one_picture,
    parts_that_are_no_pictures_are_refused_with_their_place,
    files_that_cannot_be_read_are_refused_with_what_they_are,
    links_are_not_followed,
    pictures_are_refused_where_they_cannot_stand,
    a_text_is_no_placeholder,
    one_picture_too_many_is_told_the_limit,
    pixels_have_a_budget,
    a_prompt_of_pictures_that_is_too_long_is_refused_with_its_tokens,
    memory_for_pictures_is_shared,
    a_blind_server_says_so,
    pictures_are_counted;
    giants_and_swarms_are_refused_in_little_time_and_memory,
}

/// A file of the probes.
fn probe_file(name: &str) -> Vec<u8> {
    fs::read(tests::fixture::repository("tests/probes/images").join(name)).expect("the probes have it")
}

pub(crate) fn data_url(file: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(file))
}

pub(crate) fn picture(file: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": data_url(file)}})
}

fn clip(frames: &[Vec<u8>], fps: f64) -> Value {
    let frames: Vec<String> = frames.iter().map(|frame| data_url(frame)).collect();
    json!({"type": "video", "video": frames, "fps": fps})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A greedy chat of one message of parts.
pub(crate) fn parts(parts: &[Value]) -> Value {
    with(chat(""), json!({"messages": [{"role": "user", "content": parts}]}))
}

/// A PNG of one gray: a small file of any size.
pub(crate) fn gray(width: u32, height: u32) -> Vec<u8> {
    gray_with(width, height, Vec::new())
}

/// The same with a colour profile.
fn gray_with(width: u32, height: u32, profile: Vec<u8>) -> Vec<u8> {
    let mut file = Vec::new();
    let pixels = vec![200u8; width as usize * height as usize];
    let mut encoder = PngEncoder::new_with_quality(&mut file, CompressionType::Default, FilterType::NoFilter);
    if !profile.is_empty() {
        encoder.set_icc_profile(profile).expect("PNG has profiles");
    }
    encoder.write_image(&pixels, width, height, ExtendedColorType::L8).expect("memory takes it");
    file
}

fn two_shapes() -> RgbImage {
    image::load_from_memory(&probe_file("two_shapes.png")).expect("a picture").to_rgb8()
}

/// The picture and video probes of the demo model, in the form of this wire.
fn probes() -> Vec<(Value, Value)> {
    let file = tests::fixture::repository("tests/probes/tiny.json");
    let all: Value = serde_json::from_slice(&fs::read(file).expect("the probes")).expect("JSON");
    let named = |name: &Value| probe_file(name.as_str().expect("a name"));
    let mut probes = Vec::new();
    for probe in all["probes"].as_array().expect("a list") {
        let (mut body, mut met) = (with(chat(""), json!({"messages": probe["messages"]})), false);
        for message in body["messages"].as_array_mut().expect("a list") {
            for part in message["content"].as_array_mut().into_iter().flatten() {
                *part = match part["type"].as_str() {
                    Some("image") => picture(&named(&part["image"])),
                    Some("video") => {
                        let frames: Vec<Vec<u8>> =
                            part["video"].as_array().expect("frames").iter().map(named).collect();
                        clip(&frames, part["fps"].as_f64().expect("a rate"))
                    }
                    _ => continue,
                };
                met = true;
            }
        }
        if let Some(thinking) = probe.get("enable_thinking") {
            body["enable_thinking"] = thinking.clone();
        }
        if met {
            probes.push((probe.clone(), body));
        }
    }
    probes
}

fn probes_are_answered_streamed_and_whole() {
    let server = Server::start(&[]);
    let probes = probes();
    assert_eq!(probes.len(), 13);
    for (probe, body) in probes {
        let name = &probe["id"];
        let reply = server.post(CHAT, &body).good();
        let message = &reply["choices"][0]["message"];
        let expected = probe["bf16"]["text"].as_str().expect("a text");
        let (reasoning, content) = match expected.split_once("</think>") {
            Some((reasoning, content)) => (Some(reasoning.trim()), content.trim()),
            None => (None, expected),
        };
        assert_eq!(message["content"], content, "{name}");
        assert_eq!(message["reasoning_content"].as_str().map(str::trim), reasoning, "{name}");
        assert_eq!(
            reply["usage"]["prompt_tokens"],
            probe["prompt_ids"].as_array().map_or(0, Vec::len),
            "{name}"
        );
        let stream = server.stream(CHAT, &body);
        assert_eq!(stream.usage.as_ref(), Some(&reply["usage"]), "{name}");
        let ask = json!({"model": "tiny", "messages": body["messages"]});
        let ask = with(ask, json!({"enable_thinking": body["enable_thinking"]}));
        let tokens = server.post("/tokenize", &ask).good();
        assert_eq!(tokens["tokens"], probe["prompt_ids"], "{name}");
    }
}

fn a_follow_up_and_a_text_beside_pictures_are_answered() {
    let server = Server::start(&["--lanes", "4"]);
    let asks: Vec<Value> =
        probes().into_iter().map(|(_, body)| body).chain([chat("Spell garden backwards.")]).collect();
    let sha = |reply: Value| reply["choices"][0]["token_sha"].clone();
    let alone: Vec<Value> = asks.iter().map(|ask| sha(server.post(CHAT, ask).good())).collect();
    // All together, several of each.
    std::thread::scope(|scope| {
        let crowd: Vec<_> =
            asks.iter().map(|ask| scope.spawn(|| sha(server.post(CHAT, ask).good()))).collect();
        for (alone, crowd) in alone.iter().zip(crowd) {
            assert_eq!(*alone, crowd.join().expect("an answer"));
        }
    });
    let several = with(asks[0].clone(), json!({"n": 3}));
    let reply = server.post(CHAT, &several).good();
    for choice in reply["choices"].as_array().expect("choices") {
        assert_eq!(choice["token_sha"], alone[0]);
    }
}

/// As the official client for Python sends it: fields in its order, the text first, a detail.
fn a_request_of_the_openai_client_is_taken() {
    let server = Server::start(&[]);
    let ask = |detail: &str| {
        let url = data_url(&probe_file("two_shapes.png"));
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"What color is the square?"}},{{"type":"image_url","image_url":{{"url":"{url}"{detail}}}}}]}}],"model":"tiny","max_tokens":20,"temperature":0}}"#
        );
        let ask = Ask::raw(CHAT, body)
            .header("accept", "application/json")
            .header("user-agent", "OpenAI/Python 2.0.0")
            .header("x-stainless-lang", "python");
        server.ask(&ask)
    };
    let plain = ask("");
    let tokens = plain.good()["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(tokens > 80, "{tokens}");
    assert_eq!(plain.head.get("x-roundhouse-ignored"), None);
    let auto = ask(r#","detail":"auto""#);
    assert_eq!(auto.good()["choices"], plain.good()["choices"]);
    assert_eq!(auto.head.get("x-roundhouse-ignored"), None);
    // All pictures are seen in full: other wishes are named.
    for detail in ["low", "high"] {
        let asked = ask(&format!(r#","detail":"{detail}""#));
        assert_eq!(asked.good()["choices"], plain.good()["choices"]);
        assert_eq!(asked.head.get("x-roundhouse-ignored"), Some("messages[].content[].image_url.detail"));
    }
    ask(r#","detail":"tiny""#).names("messages[0].content[1].image_url.detail");
}

fn every_format_is_the_same_picture() {
    let server = Server::start(&[]);
    let shapes = two_shapes();
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Bmp]
    {
        let mut file = Vec::new();
        shapes.write_to(&mut Cursor::new(&mut file), format).expect("memory takes it");
        let reply = server.post(CHAT, &parts(&[picture(&file), text("What color is the square?")])).good();
        assert_eq!(reply["choices"][0]["message"]["content"], "The square is blue.", "{format:?}");
        assert_eq!(reply["usage"]["prompt_tokens"], 103, "{format:?}");
    }
}

/// A picture that a camera stored turned or mirrored is the upright one.
fn all_orientations_are_one_picture() {
    let server = Server::start(&[]);
    let upright = two_shapes();
    let expected =
        server.post(CHAT, &parts(&[picture(&probe_file("two_shapes.png")), text("Describe the picture.")]));
    let expected = expected.good();
    let (w, h) = upright.dimensions();
    for orientation in 1..=8_u8 {
        let (width, height) = if orientation >= 5 { (h, w) } else { (w, h) };
        let stored = RgbImage::from_fn(width, height, |x, y| {
            let (x, y) = match orientation {
                1 => (x, y),
                2 => (w - 1 - x, y),
                3 => (w - 1 - x, h - 1 - y),
                4 => (x, h - 1 - y),
                5 => (y, x),
                6 => (w - 1 - y, x),
                7 => (w - 1 - y, h - 1 - x),
                _ => (y, h - 1 - x),
            };
            *upright.get_pixel(x, y)
        });
        let exif = [
            b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".as_slice(),
            &[orientation, 0, 0, 0, 0, 0, 0, 0],
        ];
        let mut file = Vec::new();
        let mut encoder = PngEncoder::new(&mut file);
        encoder.set_exif_metadata(exif.concat()).expect("PNG has EXIF");
        encoder
            .write_image(stored.as_raw(), width, height, ExtendedColorType::Rgb8)
            .expect("memory takes it");
        let reply = server.post(CHAT, &parts(&[picture(&file), text("Describe the picture.")])).good();
        for field in ["choices", "usage"] {
            assert_eq!(reply[field], expected[field], "orientation {orientation}");
        }
    }
}

/// Requires that each part is refused by its place with all of the words, and that the next request is answered.
fn refused(server: &Server, cases: &[(Value, &str, &[&str])]) {
    let mut connection = server.connect();
    for (part, below, words) in cases {
        let body = parts(&[text("a"), part.clone()]);
        let answer = connection.ask(&Ask::post(CHAT, &body));
        let error = answer.error(400);
        let place = format!("messages[0].content[1]{below}");
        let param = error["param"].as_str().unwrap_or_default();
        assert!(is_of(param, &place), "{place} and not {param}: {error}");
        for word in *words {
            assert!(
                error["message"].as_str().is_some_and(|message| message.contains(word)),
                "{word}: {error}"
            );
        }
        assert!(answer.text().len() < 1000, "{} bytes", answer.text().len());
    }
    assert_eq!(
        connection.ask(&Ask::post(CHAT, &chat("Spell garden backwards."))).good()["choices"][0]["message"]["content"],
        "n-e-d-r-a-g."
    );
}

fn parts_that_are_no_pictures_are_refused_with_their_place() {
    let server = Server::start(&[]);
    let small = gray(32, 32);
    let url = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let and = |mut part: Value, more: Value| {
        part.as_object_mut().expect("a part").extend(more.as_object().expect("fields").clone());
        part
    };
    let frames = clip(&[small.clone(), small.clone()], 2.0);
    let good = data_url(&small);
    refused(
        &server,
        &[
            (json!({"type": "image_url"}), ".image_url", &["missing"]),
            (json!({"type": "image_url", "image_url": good}), ".image_url", &["object"]),
            (json!({"type": "image_url", "image_url": {}}), ".image_url.url", &["missing"]),
            (json!({"type": "image_url", "image_url": {"url": 5}}), ".image_url.url", &["string"]),
            (
                json!({"type": "image_url", "image_url": {"url": good, "size": 5}}),
                ".image_url.size",
                &["no such field"],
            ),
            (and(picture(&small), json!({"text": "a"})), ".text", &["no such field"]),
            (url(""), ".image_url.url", &["no URL"]),
            (url("cat.png"), ".image_url.url", &["no URL", "data:image/png;base64"]),
            (url("data:image/png;base64"), ".image_url.url", &["comma"]),
            (url("data:image/png,abc"), ".image_url.url", &["base64"]),
            (url("data:text/plain;base64,AAEC"), ".image_url.url", &["text/plain"]),
            (url("data:application/pdf;base64,AAEC"), ".image_url.url", &["application/pdf"]),
            (url(&good[..good.len() - 1]), ".image_url.url", &["base64"]),
            (url(&good.replace(',', ", ")), ".image_url.url", &["base64"]),
            (url(&format!("{good}!")), ".image_url.url", &["base64"]),
            (and(frames.clone(), json!({"fps": 0})), ".fps", &["0.001 to 1000"]),
            (and(frames.clone(), json!({"fps": 1e-300})), ".fps", &["0.001 to 1000"]),
            (and(frames.clone(), json!({"fps": null})), ".fps", &["missing"]),
            (and(frames.clone(), json!({"fps": 1e300})), ".fps", &["1000"]),
            (and(frames.clone(), json!({"video": data_url(&small)})), ".video", &["list"]),
            (and(frames.clone(), json!({"video": []})), "", &["no frame"]),
            (and(frames.clone(), json!({"video": [good]})), "", &["1 frames", "at least 2"]),
            (and(frames.clone(), json!({"video": [good, 5]})), ".video[1]", &["data URL"]),
            (
                and(frames.clone(), json!({"video": [good, "https://example.org/a.png"]})),
                ".video[1]",
                &["link"],
            ),
            (and(frames.clone(), json!({"duration": 5})), ".duration", &["no such field"]),
            (
                json!({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAEC"}}),
                "",
                &["film files", "frames"],
            ),
            (json!({"type": "image", "image": "cat.png"}), "", &["image_url"]),
            (json!({"type": "input_image", "image_url": good}), "", &["input_image"]),
            (json!({"type": "input_audio", "input_audio": {}}), "", &["input_audio"]),
            (json!({"type": "file", "file": {}}), "", &["file"]),
        ],
    );
}

fn files_that_cannot_be_read_are_refused_with_what_they_are() {
    let server = Server::start(&[]);
    let file = probe_file("two_shapes.png");
    let mut jpeg = Vec::new();
    two_shapes().write_to(&mut Cursor::new(&mut jpeg), ImageFormat::Jpeg).expect("memory takes it");
    let small = gray(32, 32);
    refused(
        &server,
        &[
            (picture(b""), "", &["no picture of a known format", "PNG, JPEG, WebP, GIF or BMP"]),
            (picture(b"hello"), "", &["no picture of a known format"]),
            (picture(b"\0\0\0\x18ftypheic...."), "", &["HEIC"]),
            (picture(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "", &["SVG"]),
            (picture(b"%PDF-1.7"), "", &["PDF"]),
            (picture(&file[..file.len() / 2]), "", &["damaged or cut"]),
            (picture(&file[..30]), "", &["damaged or cut"]),
            (picture(&jpeg[..jpeg.len() / 2]), "", &["damaged or cut"]),
            (picture(&gray(1005, 5)), "", &["1005 x 5", "at most 200"]),
            (clip(&[small.clone(), gray(32, 16)], 2.0), ".video[1]", &["32 x 16", "one size"]),
            (
                clip(&[small.clone(), small.clone(), small[..40].to_vec()], 2.0),
                ".video[2]",
                &["damaged or cut"],
            ),
        ],
    );
    for (width, height) in [(1, 1), (27, 257), (5, 1000)] {
        server.post(CHAT, &with(parts(&[picture(&gray(width, height))]), json!({"max_tokens": 1}))).good();
    }
}

fn links_are_not_followed() {
    let server = Server::start(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("an address");
    for link in [
        format!("http://{address}/a.png"),
        format!("HTTP://{address}/a.png"),
        format!("https://{address}/a.png"),
        format!("ftp://{address}/a.png"),
        "file:///etc/passwd".into(),
        format!("//{address}/a.png"),
    ] {
        let part = json!({"type": "image_url", "image_url": {"url": link}});
        let error = server.post(CHAT, &parts(&[part])).names("messages[0].content[0].image_url.url");
        assert!(
            error["message"].as_str().is_some_and(|why| why.contains("data:image/png;base64")),
            "{error}"
        );
        let part = json!({"type": "video", "video": [link, link], "fps": 1});
        server.post(CHAT, &parts(&[part])).names("messages[0].content[0].video[0]");
    }
    assert!(listener.accept().is_err(), "somebody came");
}

fn pictures_are_refused_where_they_cannot_stand() {
    let server = Server::start(&[]);
    let small = picture(&gray(32, 32));
    let user = json!({"role": "user", "content": "Hello!"});
    for role in ["system", "developer", "assistant"] {
        let messages = json!([{"role": role, "content": [text("a"), small]}, user]);
        let error = server.post(CHAT, &with(chat(""), json!({"messages": messages})));
        let error = error.names("messages[0].content[1]");
        assert!(error["message"].as_str().is_some_and(|why| why.contains(role)), "{error}");
    }
    let tool = json!([user, {"role": "tool", "content": [small]}]);
    server.post(CHAT, &with(chat(""), json!({"messages": tool}))).names("messages[1]");
    for prompt in [json!([small]), small.clone(), json!(["a", small])] {
        server.post(COMPLETIONS, &with(completion(""), json!({"prompt": prompt}))).names("prompt");
    }
    server.post(COMPLETIONS, &with(completion("a"), json!({"images": [small]}))).names("images");
    server.post("/tokenize", &json!({"prompt": [small]})).names("prompt");
}

/// Whoever writes a placeholder does not get one.
fn a_text_is_no_placeholder() {
    let server = Server::start(&[]);
    let small = picture(&gray(32, 32));
    for word in ["<|image_pad|>", "<|video_pad|>"] {
        for (content, place) in [
            (json!(word), "messages[0].content"),
            (json!([text(word)]), "messages[0].content[0]"),
            (json!([small, text(word)]), "messages[0].content[1]"),
            (json!([text(word), small]), "messages[0].content[0]"),
            (json!([small, text(&word[..5]), text(&word[5..])]), "messages"),
        ] {
            let messages = json!([{"role": "user", "content": content}]);
            for (path, body) in [
                (CHAT, with(chat(""), json!({"messages": messages}))),
                ("/tokenize", json!({"messages": messages})),
            ] {
                let error = server.post(path, &body).names(place);
                let message = error["message"].as_str().unwrap_or_default();
                assert!(message.contains("stands for a picture"), "{error}");
            }
        }
        server.post(COMPLETIONS, &completion(word)).names("prompt");
        let ids = server.post("/tokenize", &json!({"prompt": word})).good()["tokens"].clone();
        server.post(COMPLETIONS, &with(completion(""), json!({"prompt": ids}))).names("prompt");
    }
    server.post(CHAT, &with(chat("<|vision_start|>?"), json!({"max_tokens": 1}))).good();
}

fn one_picture_too_many_is_told_the_limit() {
    let server = Server::start(&["--max-pictures", "3"]);
    let small = gray(32, 32);
    let one = || picture(&small);
    let two = || clip(&[small.clone(), small.clone()], 2.0);
    let short = |list: &[Value]| with(parts(list), json!({"max_tokens": 1}));
    for good in [vec![one(), one(), one()], vec![one(), two()], vec![two(), one()]] {
        server.post(CHAT, &short(&good)).good();
    }
    for (bad, place) in [
        (vec![one(), one(), one(), one()], "messages[0].content[3]"),
        (vec![one(), one(), two()], "messages[0].content[2]"),
        (vec![two(), text("a"), two()], "messages[0].content[2]"),
    ] {
        // None of them is looked at.
        let error = server.post(CHAT, &short(&bad)).names(place);
        let message = error["message"].as_str().unwrap_or_default();
        assert!(message.contains("4 pictures") && message.contains("at most 3"), "{error}");
    }
}

fn pixels_have_a_budget() {
    let server = Server::start(&["--max-picture-pixels", "64K"]);
    let at = |list: &[Value]| server.post(CHAT, &with(parts(list), json!({"max_tokens": 1})));
    at(&[picture(&gray(256, 256))]).good();
    at(&[picture(&gray(128, 256)), picture(&gray(256, 128))]).good();
    let error = at(&[picture(&gray(256, 256)), picture(&gray(1, 1))]).names("messages[0].content[1]");
    assert!(
        error["message"].as_str().is_some_and(|why| why.contains("65537 pixels together; at most 65536")),
        "{error}"
    );
    let frame = gray(160, 160);
    let error =
        at(&[clip(&[frame.clone(), frame.clone(), frame], 2.0)]).names("messages[0].content[0].video[2]");
    assert!(error["message"].as_str().is_some_and(|why| why.contains("3 pictures")), "{error}");
}

fn a_prompt_of_pictures_that_is_too_long_is_refused_with_its_tokens() {
    let server = Server::start(&["--context", "256"]);
    let file = probe_file("two_shapes.png");
    let list = |count: usize| {
        let mut list = vec![picture(&file); count];
        list.push(text("Describe the picture."));
        with(parts(&list), json!({"max_tokens": 1}))
    };
    server.post(CHAT, &list(2)).good();
    let before = server.metrics();
    let error = server.post(CHAT, &list(3)).names("messages");
    let message = error["message"].as_str().unwrap_or_default();
    for words in ["of text", "240 of 3 pictures", "context of 256"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    let decoded = [("outcome", "decoded")];
    let sum = |metrics: &crate::exposition::Metrics| metrics.sum("roundhouse_pictures_total", &decoded);
    assert_eq!(sum(&server.metrics()), sum(&before), "none was decoded");
}

fn memory_for_pictures_is_shared() {
    // A picture of 80 tokens holds 480 KiB of patches.
    let server = Server::start(&["--picture-memory", "600K"]);
    let file = probe_file("two_shapes.png");
    let one = || [picture(&file), text("Describe the picture.")];
    let error = server.post(CHAT, &parts(&[picture(&file), picture(&file)])).names("messages");
    assert!(error["message"].as_str().is_some_and(|why| why.contains("--picture-memory")), "{error}");
    let long = with(endless(1500), json!({"messages": parts(&one())["messages"]}));
    let mut stream = server.begin(CHAT, &long);
    stream.read(1);
    let full = server.post(CHAT, &parts(&one()));
    assert_eq!(full.error(429)["code"], "queue_full");
    assert!(full.head.get("retry-after").is_some());
    // A text needs none of it.
    server.post(CHAT, &chat("Hello!")).good();
    drop(stream);
    server.idle_within(Duration::from_secs(5));
    let start = Instant::now();
    while server.post(CHAT, &parts(&one())).status() != 200 {
        assert!(start.elapsed() < Duration::from_secs(5), "the memory is not given back");
    }
}

/// A server that was told not to see says so.
fn a_blind_server_says_so() {
    let server = Server::start(&["--vision", "off"]);
    let error =
        server.post(CHAT, &parts(&[text("a"), picture(&gray(32, 32))])).names("messages[0].content[1]");
    assert!(error["message"].as_str().is_some_and(|why| why.contains("reads no pictures")), "{error}");
    server.post(CHAT, &chat("Hello!")).good();
    let server = Server::start(&["--vision", "256"]);
    server.post(CHAT, &with(parts(&[picture(&gray(256, 256))]), json!({"max_tokens": 1}))).good();
    let error = server.post(CHAT, &parts(&[picture(&gray(512, 512))])).names("messages[0].content[0]");
    assert!(
        error["message"].as_str().is_some_and(|why| why.contains("1024 patches; 256 of one part")),
        "{error}"
    );
}

fn pictures_are_counted() {
    let server = Server::start(&[]);
    let count = |outcome: &str| server.metrics().sum("roundhouse_pictures_total", &[("outcome", outcome)]);
    assert_eq!((count("decoded"), count("refused")), (0.0, 0.0));
    let small = gray(32, 32);
    let good = parts(&[picture(&small), clip(&[small.clone(), small.clone(), small.clone()], 2.0)]);
    server.post(CHAT, &with(good, json!({"max_tokens": 1}))).good();
    assert_eq!((count("decoded"), count("refused")), (4.0, 0.0));
    let again = parts(&[picture(&small)]);
    let features =
        |outcome: &str| server.metrics().sum("roundhouse_picture_features_total", &[("outcome", outcome)]);
    let before = (features("made"), features("kept"));
    server.post(CHAT, &with(again, json!({"max_tokens": 1}))).good();
    assert_eq!((features("made"), features("kept")), (before.0, before.1 + 1.0), "it was seen before");
    server.post(CHAT, &parts(&[picture(b"x")])).error(400);
    assert_eq!((count("decoded"), count("refused")), (5.0, 1.0));
    server.post(CHAT, &parts(&[picture(&small), picture(&small[..small.len() - 20])])).error(400);
    assert_eq!(count("refused"), 2.0);
}

fn giants_and_swarms_are_refused_in_little_time_and_memory() {
    let server = Server::start(&[]);
    server.post(CHAT, &with(chat("Hello!"), json!({"max_tokens": 1}))).good();
    let giant = gray(12_000, 12_000);
    let profile = || vec![0; 400 << 20];
    let bodies = [
        (
            parts(&[picture(&gray_with(12_000, 12_000, profile()))]),
            "messages[0].content[0]",
            "144000000 pixels",
        ),
        (parts(&[picture(&giant)]), "messages[0].content[0]", "144000000 pixels"),
        (
            parts(&[clip(&[giant.clone(), giant.clone()], 2.0)]),
            "messages[0].content[0].video[0]",
            "144000000 pixels",
        ),
        (parts(&vec![picture(&gray(1, 1)); 1000]), "messages", "of 1000 pictures"),
        (parts(&vec![picture(&gray(1, 1)); 1025]), "messages[0].content[1024]", "at most 1024"),
        (parts(&[clip(&vec![gray(1, 1); 1000], 2.0)]), "messages[0].content[0]", "at most 768"),
    ];
    let bodies = bodies.map(|(body, place, words)| (Ask::post(CHAT, &body), place, words));
    let packed =
        Ask::post(CHAT, &with(parts(&[picture(&gray_with(64, 64, profile()))]), json!({"max_tokens": 1})));
    let (before, start) = (server.peak_bytes(), Instant::now());
    server.ask(&packed).good();
    for (ask, place, words) in &bodies {
        let error = server.ask(ask).names(place);
        assert!(error["message"].as_str().is_some_and(|why| why.contains(words)), "{words}: {error}");
    }
    let (grown, took) = (server.peak_bytes() - before, start.elapsed());
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(grown < 64 << 20, "{grown} bytes");
}
