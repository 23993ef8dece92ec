//! Pictures: decoding, sizes, patches, prompts and the feature cache, against recorded values and against what must hold.
//!
//! `pictures` holds one small picture of each kind of file, made by Pillow 13, and beside each what Pillow reads there,
//! composited on white.

mod cache;
mod cut;
mod decode;
mod limits;
mod oracle;
mod prompt;
mod sizes;
mod turned;

use serde_json::{Map, Value};
use tests::fixture::repository;
use tests::oracle::read_json;
use vision::{Clip, ClipBuilder, Limits, Picture, PictureError, Size, VideoSettings};

fn bytes(path: &str) -> Vec<u8> {
    let path = repository(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A file of `pictures`.
fn file(name: &str) -> Vec<u8> {
    bytes(&format!("tests/vision/pictures/{name}"))
}

fn decoded(bytes: &[u8]) -> Picture {
    vision::decode(bytes, &Limits::default()).unwrap()
}

/// A JSON file that is an object.
fn object(path: &str) -> Map<String, Value> {
    read_json(path).as_object().expect("an object").clone()
}

/// A picture in which every pixel differs from its neighbours.
fn gradient(width: u32, height: u32) -> Picture {
    let pixel = |x: u32, y: u32| [(x * 37 + y * 11) as u8, (y * 53) as u8, (x * 5 + 90) as u8];
    let rgb = (0..height).flat_map(|y| (0..width).flat_map(move |x| pixel(x, y))).collect();
    Picture::new(width, height, rgb).unwrap()
}

/// The largest difference of two pictures' values.
fn difference(a: &Picture, b: &Picture) -> u8 {
    assert_eq!([a.width(), a.height()], [b.width(), b.height()]);
    a.rgb().iter().zip(b.rgb()).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
}

fn clip_of(frames: &[Picture], seconds: Vec<f64>, settings: &VideoSettings) -> Result<Clip, PictureError> {
    let size = Size { width: frames[0].width(), height: frames[0].height() };
    let mut clip = ClipBuilder::new(size, seconds, settings)?;
    frames.iter().try_for_each(|frame| clip.push(frame))?;
    clip.finish()
}
