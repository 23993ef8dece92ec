//! Videos: frames that someone decoded, with their times. Which are used, and what the prompt says about each pair.

use std::ops::RangeInclusive;

use crate::key::{ContentKey, KeyBuilder};
use crate::patches::cut;
use crate::size::video_size;
use crate::{Grid, Patches, Picture, PictureError, Preprocess, Size, VideoSettings, resize};

/// Frames for each second of a video that does not say.
const UNKNOWN_FPS: f64 = 24.0;
/// Frames for each second that a caller may name: of others, times are not worth their digits.
pub const FRAME_RATES: RangeInclusive<f64> = 0.001..=1000.0;

/// When each frame of a video is shown.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    seconds: Vec<f64>,
    fps: f64,
}

impl Times {
    /// `frames` frames at a constant rate, 0.001 to 1000 of them for each second; `None` if it is not known (then 24). Frame
    /// `i` is shown at `i / fps`.
    pub fn at_rate(frames: usize, fps: Option<f64>) -> Result<Times, PictureError> {
        let fps = fps.unwrap_or(UNKNOWN_FPS);
        if !FRAME_RATES.contains(&fps) {
            return Err(times(format!("{fps:e} frames for each second; give 0.001 to 1000")));
        }
        Ok(Times { seconds: (0..frames).map(|index| index as f64 / fps).collect(), fps })
    }

    /// Frames whose seconds are listed, none before the one ahead of it. The rate is the mean one.
    pub fn listed(seconds: Vec<f64>) -> Result<Times, PictureError> {
        if let Some(bad) = seconds.iter().position(|time| !time.is_finite() || *time < 0.0) {
            return Err(times(format!(
                "frame {bad} is shown at {} seconds; give numbers from 0",
                seconds[bad]
            )));
        }
        if let Some(late) = seconds.array_windows().position(|[a, b]| a > b) {
            return Err(times(format!("frame {} is shown before frame {late}", late + 1)));
        }
        let length = seconds.last().unwrap_or(&0.0) - seconds.first().unwrap_or(&0.0);
        let rate = (seconds.len() as f64 - 1.0) / length;
        let fps = if rate.is_finite() && rate > 0.0 { rate } else { UNKNOWN_FPS };
        Ok(Times { seconds, fps })
    }

    /// The second at which each frame is shown.
    pub fn seconds(&self) -> &[f64] {
        &self.seconds
    }
}

/// How many frames a caller wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Choice {
    /// As the settings say.
    Settings,
    /// So many for each second, within the bounds of the settings.
    Fps(f64),
    /// So many, spread evenly.
    Frames(usize),
}

/// The frames that are used, ascending. They can be chosen before any frame is decoded.
pub fn choose_frames(
    times: &Times,
    choice: Choice,
    settings: &VideoSettings,
) -> Result<Vec<usize>, PictureError> {
    let total = times.seconds.len();
    let at_fps = |fps: f64| {
        let frames = (total as f64 / times.fps * fps) as usize;
        frames.max(settings.min_frames).min(settings.max_frames).min(total)
    };
    let count = match choice {
        Choice::Settings if !settings.choose => total,
        Choice::Settings => at_fps(settings.fps),
        Choice::Fps(fps) if fps.is_finite() && fps > 0.0 => at_fps(fps),
        Choice::Fps(fps) => {
            return Err(self::times(format!("{fps} chosen frames for each second; give a number above 0")));
        }
        Choice::Frames(asked) if asked > total => return Err(PictureError::Choice { asked, total }),
        Choice::Frames(asked) => asked,
    };
    check_count(count, settings)?;
    // As numpy's linspace: the step is rounded once, and the last frame is exact.
    let step = (total - 1) as f64 / (count - 1) as f64;
    let at = |index: usize| (index as f64 * step).round_ties_even() as usize;
    Ok((0..count - 1).map(at).chain([total - 1]).collect())
}

/// The second that the prompt names for each time pair: the mean of its first and last frame. The last frame fills up the
/// last pair.
pub fn pair_stamps(seconds: &[f64], settings: &Preprocess) -> Vec<f64> {
    let group = settings.frames as usize;
    let last_of =
        |pair: &[f64]| if pair.len() == group { pair[group - 1] } else { seconds[seconds.len() - 1] };
    seconds.chunks(group).map(|pair| (pair[0] + last_of(pair)) / 2.0).collect()
}

/// A video as the tower and the prompt need it.
#[derive(Debug, Clone, PartialEq)]
pub struct Clip {
    /// The patches of all time pairs.
    pub patches: Patches,
    /// The second of each time pair.
    pub stamps: Vec<f64>,
    /// Stands for frames, times and settings.
    pub key: ContentKey,
}

/// Makes a [`Clip`] of frames that come one after the other. It holds at most one time pair of them, resized.
pub struct ClipBuilder {
    settings: Preprocess,
    given: Size,
    resized: Size,
    seconds: Vec<f64>,
    taken: usize,
    pair: Vec<Picture>,
    patches: Patches,
    key: KeyBuilder,
}

impl ClipBuilder {
    /// A clip of one frame of `size` for each of `seconds`: those of the chosen frames, in order.
    ///
    /// # Errors
    /// Fewer than two frames, more than the settings allow, times that do not ascend, a side that is too long.
    pub fn new(size: Size, seconds: Vec<f64>, settings: &VideoSettings) -> Result<Self, PictureError> {
        check_count(seconds.len(), settings)?;
        let seconds = Times::listed(seconds)?.seconds;
        let settings = settings.preprocess;
        let resized = video_size(size, seconds.len(), &settings)?;
        let grid = Grid::video(resized, seconds.len(), &settings);
        let patches = Patches { grid, bytes: Vec::with_capacity(grid.patches() * settings.patch_values()) };
        let key = KeyBuilder::video(&settings);
        Ok(Self { settings, given: size, resized, seconds, taken: 0, pair: Vec::new(), patches, key })
    }

    /// The next frame.
    ///
    /// # Errors
    /// A frame of another size, or one too many.
    pub fn push(&mut self, frame: &Picture) -> Result<(), PictureError> {
        let size = Size { width: frame.width(), height: frame.height() };
        if size != self.given {
            let [size, given] = [size, self.given].map(|size| [size.width, size.height]);
            return Err(PictureError::FrameSize { frame: self.taken, size, given });
        }
        let Some(seconds) = self.seconds.get(self.taken) else {
            return Err(self.other_count(self.taken + 1));
        };
        self.key.add_frame(frame, *seconds);
        self.pair.push(resize(frame, self.resized));
        self.taken += 1;
        let group = self.settings.frames as usize;
        if self.taken == self.seconds.len() {
            self.pair.resize(group, self.pair[self.pair.len() - 1].clone());
        }
        if self.pair.len() == group {
            let from = self.patches.bytes.len();
            let pair_bytes = self.patches.grid.pair_patches() * self.settings.patch_values();
            self.patches.bytes.resize(from + pair_bytes, 0);
            let frames: Vec<&Picture> = self.pair.iter().collect();
            cut(&frames, self.patches.grid, &self.settings, &mut self.patches.bytes[from..]);
            self.pair.clear();
        }
        Ok(())
    }

    /// The clip, when all frames are there.
    pub fn finish(self) -> Result<Clip, PictureError> {
        if self.taken != self.seconds.len() {
            return Err(self.other_count(self.taken));
        }
        let stamps = pair_stamps(&self.seconds, &self.settings);
        Ok(Clip { patches: self.patches, stamps, key: self.key.finish() })
    }

    fn other_count(&self, frames: usize) -> PictureError {
        times(format!("{} times for {frames} frames", self.seconds.len()))
    }
}

/// What the prompt says ahead of a time pair, as in `<1.2 seconds>`: one decimal, halves to even, as Python prints it.
pub fn stamp_text(seconds: f64) -> String {
    format!("<{seconds:.1} seconds>")
}

fn check_count(count: usize, settings: &VideoSettings) -> Result<(), PictureError> {
    let range = [2, settings.max_frames];
    if count < range[0] || count > range[1] {
        return Err(PictureError::Frames { count, range });
    }
    Ok(())
}

fn times(detail: String) -> PictureError {
    PictureError::Times { detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_printed_as_python_does() {
        let printed = [0.25, 0.75, 1.25, 0.05, 0.15, 0.35, 2.5, 99.95, 0.0, 12.0].map(stamp_text);
        let expected = ["0.2", "0.8", "1.2", "0.1", "0.1", "0.3", "2.5", "100.0", "0.0", "12.0"];
        assert_eq!(printed, expected.map(|number| format!("<{number} seconds>")));
    }

    #[test]
    fn frames_are_spread_evenly() {
        let chosen = |total, fps, choice| {
            choose_frames(&Times::at_rate(total, fps).unwrap(), choice, &VideoSettings::default())
        };
        assert_eq!(chosen(100, Some(25.0), Choice::Settings).unwrap(), [0, 14, 28, 42, 57, 71, 85, 99]);
        assert_eq!(chosen(48, None, Choice::Settings).unwrap(), [0, 16, 31, 47]);
        assert_eq!(chosen(3, Some(30.0), Choice::Settings).unwrap(), [0, 1, 2]);
        assert_eq!(chosen(6, Some(1.0), Choice::Frames(3)).unwrap(), [0, 2, 5]);
        assert_eq!(chosen(10, Some(2.0), Choice::Fps(1.0)).unwrap(), [0, 2, 4, 7, 9]);
        assert_eq!(chosen(100_000, Some(25.0), Choice::Settings).unwrap().len(), 768);
        let refused = |total, choice| chosen(total, Some(2.0), choice).unwrap_err();
        assert_eq!(refused(1, Choice::Settings), PictureError::Frames { count: 1, range: [2, 768] });
        assert_eq!(refused(0, Choice::Settings), PictureError::Frames { count: 0, range: [2, 768] });
        assert_eq!(refused(4, Choice::Frames(5)), PictureError::Choice { asked: 5, total: 4 });
        assert!(matches!(refused(4, Choice::Fps(f64::NAN)), PictureError::Times { .. }));
    }
}
