//! The parts of a message: text, pictures and clips. A template sees where they are, and not their bytes.

use serde_json::{Value, json};

use super::data_url;
use super::errors::ApiError;
use super::fields::{self, Fields, Ignored};
use crate::pictures::{Content, Sent, frame_place};

/// What pictures look like on this wire.
const PICTURE: &str = r#"{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}"#;
/// And clips.
const CLIP: &str = r#"{"type": "video", "video": ["data:image/png;base64,...", ...], "fps": 2}"#;

/// Reads the parts of the messages of a request.
pub(crate) struct Parts<'a> {
    pub(crate) ignored: &'a mut Ignored,
    /// Most bytes of a picture's file.
    pub(crate) most_bytes: usize,
    /// Pictures and clips so far.
    pub(crate) sent: Vec<Sent>,
}

impl Parts<'_> {
    /// Checks a part of a message of `role`, and gives it as a template may see it.
    pub(crate) fn read(&mut self, value: Value, path: &str, role: &str) -> Result<Value, ApiError> {
        let kind = value.get("type").and_then(Value::as_str).unwrap_or("text").to_owned();
        let picture = match kind.as_str() {
            "text" => return self.text(value, path),
            "image_url" => Parts::picture,
            "video" => Parts::clip,
            "video_url" => {
                let why = format!("film files are not decoded here; send their frames: {CLIP}");
                return Err(ApiError::field(path, why));
            }
            "image" | "input_image" => {
                let why = format!("holds a part of kind {kind}; on this wire a picture is {PICTURE}");
                return Err(ApiError::field(path, why));
            }
            _ => {
                let why = format!(
                    "holds a part of kind {}, which this build does not read; give text, image_url or video",
                    super::errors::short(&kind)
                );
                return Err(ApiError::field(path, why));
            }
        };
        if role != "user" {
            let why = format!("a message of role {role} cannot hold pictures; put them in a user message");
            return Err(ApiError::field(path, why));
        }
        let (content, seen) = picture(self, value, path)?;
        self.sent.push(Sent { place: path.to_owned(), content });
        Ok(seen)
    }

    fn text(&mut self, value: Value, path: &str) -> Result<Value, ApiError> {
        let mut fields = Fields::new(value, path, &fields::PART, self.ignored)?;
        if fields.text("type")?.is_none() {
            return Err(fields.wrong("type", "is missing"));
        }
        let Some(text) = fields.text("text")? else { return Err(fields.wrong("text", "is missing")) };
        fields.finish()?;
        Ok(json!({"type": "text", "text": text}))
    }

    fn picture(&mut self, value: Value, path: &str) -> Result<(Content, Value), ApiError> {
        let mut fields = Fields::new(value, path, &fields::PICTURE_PART, self.ignored)?;
        fields.text("type")?;
        let Some(source) = fields.any("image_url") else {
            return Err(fields.wrong("image_url", format!("is missing; give {PICTURE}")));
        };
        let mut source = Fields::new(source, &fields.path("image_url"), &fields::IMAGE_URL, self.ignored)?;
        fields.finish()?;
        match source.text("detail")?.as_deref() {
            None | Some("auto") => {}
            // The model sees every picture in the same detail, which its size decides.
            Some("low" | "high") => self.ignored.add("messages[].content[].image_url.detail"),
            Some(_) => return Err(source.wrong("detail", "must be auto, low or high")),
        }
        let Some(url) = source.text("url")? else { return Err(source.wrong("url", "is missing")) };
        let file = data_url::bytes(&url, self.most_bytes).map_err(|why| source.wrong("url", why))?;
        source.finish()?;
        Ok((Content::Picture(file), json!({"type": "image_url", "image_url": {"url": ""}})))
    }

    fn clip(&mut self, value: Value, path: &str) -> Result<(Content, Value), ApiError> {
        let mut fields = Fields::new(value, path, &fields::CLIP_PART, self.ignored)?;
        fields.text("type")?;
        let fps = fields.any("fps").map(|fps| {
            let rate = fps.as_f64().filter(|rate| vision::FRAME_RATES.contains(rate));
            rate.ok_or_else(|| fields.wrong("fps", "must be a number from 0.001 to 1000"))
        });
        let Some(fps) = fps.transpose()? else {
            let why = "is missing; say how many of the frames make a second";
            return Err(fields.wrong("fps", why));
        };
        let Some(list) = fields.list("video")? else {
            return Err(fields.wrong("video", format!("is missing; give {CLIP}")));
        };
        fields.finish()?;
        let frame = |(at, frame): (usize, Value)| {
            let place = frame_place(path, at);
            let Value::String(url) = frame else {
                return Err(ApiError::field(place, "must be a data URL of a frame"));
            };
            data_url::bytes(&url, self.most_bytes).map_err(|why| ApiError::field(place, why))
        };
        let frames: Vec<Vec<u8>> = list.into_iter().enumerate().map(frame).collect::<Result<_, _>>()?;
        Ok((Content::Clip { frames, fps }, json!({"type": "video", "video": [], "fps": fps})))
    }
}
