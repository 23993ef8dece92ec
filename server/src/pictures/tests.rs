//! Pictures from bytes to media, with the demo model's tokenizer and template and how it sees.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::chat::{ChatRequest, ChatTemplate};
use runtime::pictures::Sight;
use runtime::request::Media;
use runtime::tokenizer::Tokenizer;
use serde_json::{Value, json};
use vision::{MediaIds, Preprocess, VideoSettings};

use super::*;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

fn tiny() -> (Tokenizer, ChatTemplate, Arc<Sight>) {
    let dir = repository("models/tiny");
    let read = |name: &str| -> serde_json::Map<String, Value> {
        serde_json::from_str(&fs::read_to_string(dir.join(name)).unwrap()).unwrap()
    };
    let tokenizer = Tokenizer::open(&dir).unwrap();
    let id = |word: &str| tokenizer.token_id(word).unwrap();
    let ids = MediaIds {
        image: id("<|image_pad|>"),
        video: id("<|video_pad|>"),
        start: id("<|vision_start|>"),
        end: id("<|vision_end|>"),
    };
    let sight = Sight {
        picture: Preprocess::read(&read("preprocessor_config.json")).unwrap(),
        video: VideoSettings::read(&read("video_preprocessor_config.json")).unwrap(),
        ids,
        most_patches: 4096,
    };
    (tokenizer, ChatTemplate::open(&dir).unwrap(), Arc::new(sight))
}

/// A one-colour PNG.
fn png(width: u32, height: u32) -> Vec<u8> {
    let mut file = Vec::new();
    let picture = image::RgbImage::from_pixel(width, height, image::Rgb([9, 99, 199]));
    picture.write_to(&mut std::io::Cursor::new(&mut file), image::ImageFormat::Png).unwrap();
    file
}

fn still(place: &str, file: Vec<u8>) -> Sent {
    Sent { place: place.into(), content: Content::Picture(file) }
}

fn clip(frames: Vec<Vec<u8>>) -> Sent {
    Sent { place: "clip".into(), content: Content::Clip { frames, fps: 2.0 } }
}

fn planned(sent: Vec<Sent>, sight: &Sight) -> Result<Vec<Planned>, Refused> {
    look(sent, &Allowed::default())?.into_iter().map(|looked| looked.plan(sight)).collect()
}

/// Puts the pictures of a chat in place and decodes them.
fn seen(chat: &ChatRequest, sent: Vec<Sent>, context: usize) -> Result<(Vec<u32>, Vec<Media>), String> {
    let (tokenizer, template, sight) = tiny();
    let text = template.render(chat).unwrap();
    check_words(chat, &text, &template, &tokenizer, &sight).map_err(|why| why.to_string())?;
    let ids = tokenizer.encode(&text).unwrap();
    let planned = planned(sent, &sight).map_err(|why| why.to_string())?;
    let placed = Placed::new(&ids, planned, &sight, &tokenizer, context, 1)?;
    placed.decode(&sight).map_err(|why| why.to_string())
}

/// Every picture and video probe of the demo model has the recorded prompt, row by row.
#[test]
fn the_prompts_of_the_probes_are_the_recorded_ones() {
    let all: Value =
        serde_json::from_str(&fs::read_to_string(repository("tests/probes/tiny.json")).unwrap()).unwrap();
    let file =
        |name: &Value| fs::read(repository("tests/probes/images").join(name.as_str().unwrap())).unwrap();
    let mut met = 0;
    for probe in all["probes"].as_array().unwrap() {
        let mut sent = Vec::new();
        for part in probe["messages"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|message| message["content"].as_array().into_iter().flatten())
        {
            let content = match part["type"].as_str().unwrap() {
                "image" => Content::Picture(file(&part["image"])),
                "video" => Content::Clip {
                    frames: part["video"].as_array().unwrap().iter().map(file).collect(),
                    fps: part["fps"].as_f64().unwrap(),
                },
                _ => continue,
            };
            sent.push(Sent { place: "part".into(), content });
        }
        if sent.is_empty() {
            continue;
        }
        let media = sent.len();
        let chat = ChatRequest {
            enable_thinking: probe["enable_thinking"].as_bool(),
            ..ChatRequest::new(probe["messages"].clone())
        };
        let (ids, seen) = seen(&chat, sent, 4096).unwrap();
        assert_eq!(json!(ids), probe["prompt_ids"], "{}", probe["id"]);
        assert_eq!(seen.len(), media);
        let (_, _, sight) = tiny();
        let rows: usize = seen.iter().flat_map(|media| &media.spans).map(vision::Span::rows).sum();
        let pads = ids.iter().filter(|id| [sight.ids.image, sight.ids.video].contains(id)).count();
        assert_eq!(rows, pads, "{}", probe["id"]);
        for (number, media) in seen.iter().enumerate() {
            let own: usize = media.spans.iter().map(vision::Span::rows).sum();
            assert_eq!(own * 4, media.patches.grid.patches(), "{}", probe["id"]);
            assert_eq!(media.patches.bytes.len(), media.patches.grid.patches() * 1536);
            assert!(media.spans.iter().all(|span| span.medium == number));
        }
        met += 1;
    }
    assert_eq!(met, 13);
}

#[test]
fn what_cannot_be_seen_is_refused_with_its_place_before_pixels() {
    let (_, _, sight) = tiny();
    let refused = |sent: Vec<Sent>, place: &str, words: &str| {
        let why = planned(sent, &sight).unwrap_err();
        assert_eq!(why.place, place, "{why}");
        assert!(why.why.contains(words), "{why}");
    };
    refused(vec![still("a", png(9, 9)), still("b", b"x".to_vec())], "b", "no picture");
    refused(vec![still("a", Vec::new())], "a", "no picture");
    refused(vec![still("a", b"\0\0\0\x18ftypheic".to_vec())], "a", "HEIC");
    refused(vec![still("a", png(1005, 5))], "a", "at most 200 times");
    refused(vec![still("a", png(1500, 1500))], "a", "8836 patches; 4096 of one part");
    refused(vec![clip(Vec::new())], "clip", "no frame");
    refused(vec![clip(vec![png(9, 9)])], "clip", "1 frames to use; it needs at least 2");
    refused(vec![clip(vec![png(9, 9), png(9, 9), png(9, 8)])], "clip.video[2]", "9 x 8 pixels");
    refused(vec![clip(vec![png(9, 9), b"GIF".to_vec()])], "clip.video[1]", "no picture");
    refused(vec![clip(vec![png(9, 9); 769])], "clip", "at most 768");
    assert!(planned(vec![still("a", png(1, 1)), still("b", png(27, 257))], &sight).is_ok());
}

#[test]
fn a_request_has_one_budget_for_all_of_its_pictures() {
    let allowed = Allowed { budget: Budget { pictures: 3, pixels: 250 }, ..Allowed::default() };
    let looked = |sent| look(sent, &allowed).map(|looked| looked.len());
    assert_eq!(looked(vec![still("a", png(10, 10)), still("b", png(10, 10))]), Ok(2));
    let why = looked(vec![still("a", png(10, 10)), clip(vec![png(10, 10), png(10, 10)])]).unwrap_err();
    assert_eq!(why.place, "clip.video[1]");
    assert!(why.why.contains("300 pixels together; at most 250"), "{why}");
    let why = looked(vec![clip(vec![png(1, 1); 4])]).unwrap_err();
    assert!(why.why.contains("4 pictures") && why.why.contains("at most 3"), "{why}");
}

#[test]
fn pictures_are_counted_before_they_are_read() {
    let part = json!({"type": "image_url", "image_url": {"url": "no URL at all"}});
    let clip = json!({"type": "video", "video": [1, 2, 3], "fps": 0});
    let messages = json!([
        {"role": "system", "content": "a"}, 5, {"role": "user", "content": [part, {"type": "text"}]},
        {"role": "user", "content": [part, clip]},
    ]);
    assert_eq!(count(&messages, 5), Ok(()));
    let why = count(&messages, 4).unwrap_err();
    assert_eq!(why.place, "messages[3].content[1]");
    assert!(why.why.contains("5 pictures") && why.why.contains("at most 4"), "{why}");
    for odd in [json!(null), json!({"a": 1}), json!([{"content": {}}]), json!([{"content": [[], 1, "x"]}])] {
        assert_eq!(count(&odd, 0), Ok(()));
    }
}

#[test]
fn a_prompt_that_is_too_long_says_what_is_text_and_what_pictures() {
    let picture = json!({"type": "image", "image": ""});
    let text = json!({"type": "text", "text": "Describe the picture."});
    let chat = ChatRequest::new(json!([{"role": "user", "content": [picture, picture, text]}]));
    let sent = || vec![still("a", png(320, 256)), still("b", png(320, 256))];
    let (ids, _) = seen(&chat, sent(), 4096).unwrap();
    assert!(seen(&chat, sent(), ids.len() + 1).is_ok());
    for context in [ids.len(), 100, 1] {
        let why = seen(&chat, sent(), context).unwrap_err();
        let words = [format!("{} tokens", ids.len()), format!("{} of text and 160 of 2", ids.len() - 160)];
        words.iter().for_each(|word| assert!(why.contains(word), "{word} is not in {why}"));
    }
}

/// Whoever writes a placeholder does not get one: alone, beside pictures, in pieces, wherever a text may stand.
#[test]
fn a_text_makes_no_placeholder() {
    let (tokenizer, _, sight) = tiny();
    let picture = json!({"type": "image", "image": ""});
    let said = |text: &str| json!({"type": "text", "text": text});
    let attack = |messages: Value, pictures: usize, place: &str| {
        let sent = (0..pictures).map(|_| still("a", png(32, 32))).collect();
        let why = seen(&ChatRequest::new(messages.clone()), sent, 4096).unwrap_err();
        assert!(why.starts_with(&format!("{place}: ")), "{messages}: {why}");
        assert!(why.contains("stands for a picture"), "{why}");
    };
    for word in
        ["<|image_pad|>", "<|video_pad|>", "a<|image_pad|>b", "<|vision_start|><|image_pad|><|vision_end|>"]
    {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        attack(user(json!(word)), 0, "messages[0].content");
        attack(user(json!([said(word)])), 0, "messages[0].content[0]");
        attack(user(json!([picture, said(word)])), 1, "messages[0].content[1]");
        attack(user(json!([said(word), picture])), 1, "messages[0].content[0]");
        attack(user(json!([picture, said(word)])), 2, "messages[0].content[1]");
        attack(user(json!([picture, said("<|image"), said("_pad|>")])), 1, "messages");
        let turns = json!([
            {"role": "system", "content": "a"},
            {"role": "user", "content": [picture]},
            {"role": "assistant", "content": "b", "reasoning_content": word},
            {"role": "user", "content": "c"},
        ]);
        attack(turns, 1, "messages[2].reasoning_content");
    }
    assert!(stray(&[1, 2, sight.ids.image], &sight).unwrap().contains("position 2"));
    assert!(stray(&[sight.ids.video], &sight).is_some());
    assert_eq!(stray(&[sight.ids.start, sight.ids.end, 5], &sight), None);
    assert_eq!(stray(&tokenizer.encode("<|image _pad|>").unwrap(), &sight), None);
    // Around a picture, pieces do not meet.
    let apart = json!([{"role": "user", "content": [said("<|image"), picture, said("_pad|>")]}]);
    assert!(seen(&ChatRequest::new(apart), vec![still("a", png(32, 32))], 4096).is_ok());
}

#[test]
fn what_breaks_while_it_is_decoded_is_named_by_its_file() {
    let chat =
        |kind: &str| ChatRequest::new(json!([{"role": "user", "content": [{"type": kind, kind: ""}]}]));
    let cut = |mut file: Vec<u8>| {
        file.truncate(file.len() * 2 / 3);
        file
    };
    let noise = || {
        let mut file = Vec::new();
        let picture = image::RgbImage::from_fn(64, 64, |x, y| image::Rgb([(x * y) as u8, (x ^ y) as u8, 7]));
        picture.write_to(&mut std::io::Cursor::new(&mut file), image::ImageFormat::Png).unwrap();
        file
    };
    let why = seen(&chat("image"), vec![still("messages[0].content[0]", cut(noise()))], 4096).unwrap_err();
    assert!(why.starts_with("messages[0].content[0]: ") && why.contains("damaged or cut"), "{why}");
    let why = seen(&chat("video"), vec![clip(vec![noise(), noise(), cut(noise())])], 4096).unwrap_err();
    assert!(why.starts_with("clip.video[2]: ") && why.contains("damaged or cut"), "{why}");
}
